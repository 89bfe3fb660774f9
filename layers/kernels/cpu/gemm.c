/* y[M, N] = x[M, K] w[N, K]^T in bf16 with float32 accumulation, for weights packed once; gated by SiLU if wanted.
 *
 * Packed layout: columns of w in groups of 32 (N padded with zeros), then K in blocks of 32:
 *     packed[N / 32][K / 32][2 halves][16 pairs of k][16 columns][2 k]
 * so one half block is both an AMX tile (16 rows of 64 bytes) and 16 AVX-512 vectors, and a thread reads its share of
 * the weights front to back. One row's sums are formed in the same order whatever M is, so a row's result does not
 * depend on the other rows of the batch.
 */
#include "common.h"

#define GROUP 32                    /* columns a group */
#define KBLOCK 32                   /* k values a block */
#define HALF (KBLOCK * 16)          /* elements of a half block */
#define BLOCK (2 * HALF)
#define FETCH_BLOCKS 6              /* blocks of weights fetched ahead of their use */
#define ROW_CHUNK 256               /* rows whose activations stay in the L2 cache while weights stream past */

#if HAVE_BF16_DOT && defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define HAVE_AMX 1
#else
#define HAVE_AMX 0
#endif

enum { GEMM_NONE = 0, GEMM_AVX512 = 1, GEMM_AMX = 2 };

static int gemm_level = GEMM_NONE;

/* Best level this process may use, at most `limit`: 0 none, 1 AVX-512 bf16, 2 AMX. Sets it for later calls. */
EXPORT int lockstep_gemm_init(int limit) {
    int level = HAVE_BF16_DOT ? GEMM_AVX512 : GEMM_NONE;
#if HAVE_AMX
    /* Linux hands out the tile registers' state on request: arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA). */
    if (limit >= GEMM_AMX && syscall(SYS_arch_prctl, 0x1023, 18) == 0) level = GEMM_AMX;
#endif
    gemm_level = level < limit ? level : limit;
    return gemm_level;
}

/* Elements of the packed form of w[n, k]; k must be a multiple of 32. */
EXPORT int64_t lockstep_gemm_packed_size(int64_t n, int64_t k) { return (n + GROUP - 1) / GROUP * GROUP * k; }

EXPORT void lockstep_gemm_pack(const bf16 *w, int64_t ldw, int64_t n, int64_t k, bf16 *packed) {
    int64_t groups = (n + GROUP - 1) / GROUP;
#pragma omp parallel for schedule(static)
    for (int64_t group = 0; group < groups; group++) {
        bf16 *out = packed + group * GROUP * k;
        for (int64_t kb = 0; kb < k / KBLOCK; kb++)
            for (int half = 0; half < 2; half++)
                for (int pair = 0; pair < 16; pair++)
                    for (int column = 0; column < 16; column++, out += 2) {
                        int64_t row = group * GROUP + half * 16 + column;
                        const bf16 *source = w + row * ldw + kb * KBLOCK + pair * 2;
                        out[0] = row < n ? source[0] : 0;
                        out[1] = row < n ? source[1] : 0;
                    }
    }
}

#if HAVE_BF16_DOT

/* Where results go: `y` is of float32 or bf16 elements; `bias` [columns] or null is added first. */
struct target {
    void *y;
    const bf16 *bias;
    int64_t ldy, columns;
    int dtype;
};

/* Store 16 columns of one row; columns past the last are padding. */
static inline void store_row(const struct target *out, int64_t row, int64_t column, __m512 sums) {
    int64_t valid = out->columns - column;
    if (valid <= 0) return;
    __mmask16 mask = valid >= 16 ? 0xffff : (__mmask16)((1u << valid) - 1);
    int64_t offset = row * out->ldy + column;
    if (out->bias) {
        __m512i bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, out->bias + column));
        sums = _mm512_add_ps(sums, _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)));
    }
    if (out->dtype == DTYPE_BFLOAT16)
        _mm256_mask_storeu_epi16((bf16 *)out->y + offset, mask, (__m256i)_mm512_cvtneps_pbh(sums));
    else
        _mm512_mask_storeu_ps((float *)out->y + offset, mask, sums);
}

/* `rows` (a constant after inlining) rows of x times one group of 32 columns. */
static inline __attribute__((always_inline)) void avx512_rows(
    const int rows, const bf16 *x, int64_t ldx, const bf16 *w, int64_t k, const struct target *out, int64_t row,
    int64_t column) {
    x += row * ldx;
    __m512 low[12], high[12];
    for (int r = 0; r < rows; r++) low[r] = high[r] = _mm512_setzero_ps();
    for (int64_t kb = 0; kb < k; kb += KBLOCK, w += BLOCK) {
        for (int pair = 0; pair < 16; pair++) {
            __m512bh w0 = (__m512bh)_mm512_loadu_si512(w + pair * 32);
            __m512bh w1 = (__m512bh)_mm512_loadu_si512(w + HALF + pair * 32);
            _mm_prefetch((const char *)(w + pair * 32 + FETCH_BLOCKS * BLOCK), _MM_HINT_T0);
            _mm_prefetch((const char *)(w + HALF + pair * 32 + FETCH_BLOCKS * BLOCK), _MM_HINT_T0);
            for (int r = 0; r < rows; r++) {
                int32_t two;
                memcpy(&two, x + r * ldx + kb + pair * 2, 4);
                __m512bh value = (__m512bh)_mm512_set1_epi32(two);
                low[r] = _mm512_dpbf16_ps(low[r], value, w0);
                high[r] = _mm512_dpbf16_ps(high[r], value, w1);
            }
        }
    }
    for (int r = 0; r < rows; r++) {
        store_row(out, row + r, column, low[r]);
        store_row(out, row + r, column + 16, high[r]);
    }
}

/* Rows [row, end) times one group. */
static void avx512_group(const bf16 *x, int64_t ldx, int64_t row, int64_t end, const bf16 *w, int64_t k,
                         const struct target *out, int64_t column) {
    for (; row + 8 <= end; row += 8) avx512_rows(8, x, ldx, w, k, out, row, column);
    switch (end - row) {
        case 7: avx512_rows(7, x, ldx, w, k, out, row, column); break;
        case 6: avx512_rows(6, x, ldx, w, k, out, row, column); break;
        case 5: avx512_rows(5, x, ldx, w, k, out, row, column); break;
        case 4: avx512_rows(4, x, ldx, w, k, out, row, column); break;
        case 3: avx512_rows(3, x, ldx, w, k, out, row, column); break;
        case 2: avx512_rows(2, x, ldx, w, k, out, row, column); break;
        case 1: avx512_rows(1, x, ldx, w, k, out, row, column); break;
        default: break;
    }
}

/* Weights to fetch while others are multiplied: `lines` cache lines a block of k. */
struct ahead {
    const char *from;
    int lines;
};

/* For group `w` and `rows` rows. A single block of 32 rows reads the weights as fast as memory gives them and fetches a
 * little ahead; of several, each fetches its part of the next group. */
static struct ahead plan_ahead(const bf16 *w, int64_t k, int64_t rows) {
    const int64_t blocks = (rows + 31) / 32;
    return (struct ahead){(const char *)(blocks == 1 ? w + FETCH_BLOCKS * BLOCK : w + GROUP * k),
                          (int)((BLOCK * (int64_t)sizeof(bf16) / 64 + blocks - 1) / blocks)};
}

/* Past what one block of rows has fetched. */
static void skip_fetched(struct ahead *ahead, int64_t k) { ahead->from += k / KBLOCK * ahead->lines * 64; }

#endif

#if HAVE_AMX

struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes_per_row[16];
    uint8_t rows[16];
} ALIGNED;

/* Tiles 0-3 are sums (0 and 1 of the upper rows, 2 and 3 of the lower), 4 and 5 activations, 6 and 7 weights. */
static void configure_tiles(int upper, int lower) {
    struct tile_config config = {.palette = 1};
    const int rows[8] = {upper, upper, lower, lower, upper, lower, 16, 16};
    for (int tile = 0; tile < 8; tile++) {
        config.rows[tile] = (uint8_t)(rows[tile] ? rows[tile] : 1);
        config.bytes_per_row[tile] = 64;
    }
    _tile_loadconfig(&config);
}

static void store_tiles(const float sums[4][16][16], int upper, int lower, const struct target *out, int64_t row,
                        int64_t column) {
    for (int r = 0; r < upper + lower; r++) {
        int tile = r < upper ? 0 : 2, line = r < upper ? r : r - upper;
        store_row(out, row + r, column, _mm512_load_ps(sums[tile][line]));
        store_row(out, row + r, column + 16, _mm512_load_ps(sums[tile + 1][line]));
    }
}

static inline void fetch_ahead(struct ahead *ahead) {
    for (int line = 0; line < ahead->lines; line++, ahead->from += 64) __builtin_prefetch(ahead->from, 0, 2);
}

/* Up to 32 rows times one group, with the tiles configured for `upper` (<= 16) and `lower` (<= 16) rows. */
static void amx_group(const bf16 *x, int64_t ldx, int upper, int lower, const bf16 *w, int64_t k,
                      const struct target *out, int64_t row, int64_t column, struct ahead ahead) {
    float ALIGNED sums[4][16][16];
    const int64_t stride = ldx * (int64_t)sizeof(bf16);
    x += row * ldx;
    _tile_zero(0);
    _tile_zero(1);
    if (lower) {
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t kb = 0; kb < k; kb += KBLOCK, w += BLOCK) {
            fetch_ahead(&ahead);
            _tile_loadd(4, x + kb, stride);
            _tile_loadd(6, w, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, w + HALF, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, x + 16 * ldx + kb, stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(2, sums[2], 64);
        _tile_stored(3, sums[3], 64);
    } else {
        for (int64_t kb = 0; kb < k; kb += KBLOCK, w += BLOCK) {
            fetch_ahead(&ahead);
            _tile_loadd(4, x + kb, stride);
            _tile_loadd(6, w, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, w + HALF, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    store_tiles(sums, upper, lower, out, row, column);
}

#endif

#if HAVE_BF16_DOT

/* Up to 32 rows from `row` on times the group of weights `w`, into `column` and the 31 after it.
 * configured: rows that this thread's tiles are configured for, 0 for none. */
static inline void multiply(const bf16 *x, int64_t ldx, int rows, const bf16 *w, int64_t k, const struct target *out,
                            int64_t row, int64_t column, struct ahead ahead, int *configured) {
#if HAVE_AMX
    if (gemm_level == GEMM_AMX) {
        const int upper = rows < 16 ? rows : 16;
        if (*configured != rows) configure_tiles(upper, rows - upper);
        *configured = rows;
        amx_group(x, ldx, upper, rows - upper, w, k, out, row, column, ahead);
        return;
    }
#endif
    (void)ahead, (void)configured;
    avx512_group(x, ldx, row, row + rows, w, k, out, column);
}

static inline void release_tiles(int configured) {
#if HAVE_AMX
    if (configured) _tile_release();
#else
    (void)configured;
#endif
}

/* Groups [begin, end) of the product. */
static void plain_groups(const bf16 *x, int64_t ldx, int64_t m, const bf16 *packed, int64_t k,
                         const struct target *out, int64_t begin, int64_t end) {
    int configured = 0;
    for (int64_t chunk = 0; chunk < m; chunk += ROW_CHUNK) {
        const int64_t chunk_end = chunk + ROW_CHUNK < m ? chunk + ROW_CHUNK : m;
        for (int64_t column = begin * GROUP; column < end * GROUP; column += GROUP) {
            const bf16 *w = packed + column * k;
            struct ahead ahead = plan_ahead(w, k, chunk_end - chunk);
            for (int64_t row = chunk; row < chunk_end; row += 32) {
                const int rows = (int)(chunk_end - row < 32 ? chunk_end - row : 32);
                multiply(x, ldx, rows, w, k, out, row, column, ahead, &configured);
                skip_fetched(&ahead, k);
            }
        }
    }
    release_tiles(configured);
}

/* Groups [begin, end) of silu(gate) * up, for weights [gate | up] of n columns each. A group of either goes to a small
 * buffer first, rounded to bf16 as the plain product is. */
static void gated_groups(const bf16 *x, int64_t ldx, int64_t m, const bf16 *packed, int64_t n, int64_t k,
                         const bf16 *bias, bf16 *y, int64_t ldy, int64_t begin, int64_t end) {
    bf16 ALIGNED gate[32 * GROUP], up[32 * GROUP];
    int configured = 0;
    for (int64_t chunk = 0; chunk < m; chunk += ROW_CHUNK) {
        const int64_t chunk_end = chunk + ROW_CHUNK < m ? chunk + ROW_CHUNK : m;
        for (int64_t column = begin * GROUP; column < end * GROUP; column += GROUP) {
            const bf16 *w_gate = packed + column * k, *w_up = packed + (n + column) * k;
            const struct target gate_out = {gate, bias ? bias + column : NULL, GROUP, GROUP, DTYPE_BFLOAT16};
            const struct target up_out = {up, bias ? bias + n + column : NULL, GROUP, GROUP, DTYPE_BFLOAT16};
            struct ahead gate_ahead = plan_ahead(w_gate, k, chunk_end - chunk);
            struct ahead up_ahead = plan_ahead(w_up, k, chunk_end - chunk);
            for (int64_t row = chunk; row < chunk_end; row += 32) {
                const int rows = (int)(chunk_end - row < 32 ? chunk_end - row : 32);
                multiply(x + row * ldx, ldx, rows, w_gate, k, &gate_out, 0, 0, gate_ahead, &configured);
                multiply(x + row * ldx, ldx, rows, w_up, k, &up_out, 0, 0, up_ahead, &configured);
                skip_fetched(&gate_ahead, k);
                skip_fetched(&up_ahead, k);
                for (int r = 0; r < rows; r++)
                    for (int c = 0; c < GROUP; c += LANES) {
                        vec silu = round_bf16_lanes(silu_lanes(load_bf16_lanes(gate + r * GROUP + c)));
                        vec gated = silu * load_bf16_lanes(up + r * GROUP + c);
                        store_bf16_lanes(y + (row + r) * ldy + column + c, gated);
                    }
            }
        }
    }
    release_tiles(configured);
}

#endif

/* y[m, n] (row stride ldy, element type `dtype`) = x[m, k] (row stride ldx) times the packed w[n, k]^T plus bias
 * [n] or null; k a multiple of 32. */
EXPORT void lockstep_gemm(const bf16 *x, int64_t ldx, int64_t m, const bf16 *packed, int64_t n, int64_t k,
                          const bf16 *bias, void *y, int64_t ldy, int dtype, int num_threads) {
#if HAVE_BF16_DOT
    const struct target out = {y, bias, ldy, n, dtype};
    int64_t groups = (n + GROUP - 1) / GROUP;
#pragma omp parallel num_threads(num_threads)
    {
        int64_t begin, end;
        share(groups, omp_get_thread_num(), omp_get_num_threads(), &begin, &end);
        plain_groups(x, ldx, m, packed, k, &out, begin, end);
    }
#else
    (void)x, (void)ldx, (void)m, (void)packed, (void)n, (void)k, (void)bias, (void)y,
        (void)ldy, (void)dtype, (void)num_threads;
#endif
}

/* y[m, n] bf16 = silu(gate) * up of x[m, k] times the packed [gate | up][2 n, k]^T plus bias [2 n] or null; k and n
 * multiples of 32. */
EXPORT void lockstep_gemm_gated(const bf16 *x, int64_t ldx, int64_t m, const bf16 *packed, int64_t n, int64_t k,
                                const bf16 *bias, bf16 *y, int64_t ldy, int num_threads) {
#if HAVE_BF16_DOT
#pragma omp parallel num_threads(num_threads)
    {
        int64_t begin, end;
        share(n / GROUP, omp_get_thread_num(), omp_get_num_threads(), &begin, &end);
        gated_groups(x, ldx, m, packed, n, k, bias, y, ldy, begin, end);
    }
#else
    (void)x, (void)ldx, (void)m, (void)packed, (void)n, (void)k, (void)bias, (void)y, (void)ldy, (void)num_threads;
#endif
}
