/* Causal attention over keys and values scattered in slots, for prefill with prefix and for decode alike.
 *
 * A task is one key/value head of a few query rows of one request ("lines": every query head of that group, of every
 * row). It walks the visible positions in chunks of 64 from position 0: the chunk's keys are transposed so that lanes are
 * positions, values are widened to float32, and the softmax is kept online. A line's arithmetic depends only on its own
 * visible positions, never on the other lines, so decode, prefill and any batch give the same bits.
 */
#include "common.h"

#define CHUNK 64
#define LANES 16

typedef float vec __attribute__((vector_size(64)));
typedef int32_t int_vec __attribute__((vector_size(64)));
typedef uint32_t uint_vec __attribute__((vector_size(64)));
typedef bf16 bf16_vec __attribute__((vector_size(32), aligned(2)));

/* One call. Strides count elements. Mirrored field by field in native.py. */
struct attention_args {
    const void *q, *k, *v;              /* [T, N, D], [T, K, D], [T, K, E] new rows; v null: the value is part of the key */
    void *k_cache, *v_cache;            /* [S, K, D], [S, K, E] of this layer */
    void *out;                          /* [T, N, E] contiguous */
    const int64_t *slots;               /* [T] slots of the new rows */
    const int32_t *request_table;       /* [R, C] */
    const int64_t *request_rows;        /* [B] */
    const int32_t *seq_lens;            /* [B] visible to the last row */
    const int32_t *query_start;         /* [B + 1] */
    const int32_t *tasks;               /* [num_tasks, 2] request and first row of it; null: one row a request */
    int64_t q_row, q_head, k_row, k_head, v_row, v_head;
    int64_t k_cache_slot, k_cache_head, v_cache_slot, v_cache_head;
    int64_t table_row;
    int64_t num_tokens, num_tasks, rows_per_task;
    int64_t num_heads, num_kv_heads, head_dim, v_head_dim;
    float scale;
    int32_t dtype, num_threads;
};

/* Per-thread scratch of one task. */
struct scratch {
    float *keys;      /* [words, 64]: word w of position j at [w][j]; a word is a float or, with bf16 dot products, a pair */
    float *values;    /* [64, padded v_head_dim] */
    float *queries;   /* [lines, words] */
    float *scores;    /* [lines, 64] */
    float *sums;      /* [lines, padded v_head_dim] */
    float *max, *total; /* [lines] */
    int32_t *visible;   /* [lines] positions each line sees */
};

static const int_vec lane_numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* Lanes of `a` where the comparison held (all bits set), of `b` elsewhere. */
static inline vec choose(int_vec held, vec a, vec b) { return (vec)((held & (int_vec)a) | (~held & (int_vec)b)); }

/* `fast_exp` of 16 lanes. */
static inline vec exp_lanes(vec x) {
    vec result;
    for (int i = 0; i < LANES; i++) result[i] = fast_exp(x[i]);
    return result;
}

static inline int64_t round_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

static inline int64_t item_size(int dtype) { return dtype == DTYPE_BFLOAT16 ? 2 : 4; }

/* True when scores are formed by bf16 pair products rather than in float32. */
static inline int uses_pairs(const struct attention_args *a) { return HAVE_BF16_DOT && a->dtype == DTYPE_BFLOAT16; }

static inline int64_t words_of(const struct attention_args *a) {
    return uses_pairs(a) ? (a->head_dim + 1) / 2 : a->head_dim;
}

static inline void widen(const void *restrict source, int dtype, int64_t n, float *restrict out) {
    if (dtype == DTYPE_BFLOAT16) {
        const bf16 *restrict p = source;
        for (int64_t i = 0; i < n; i++) out[i] = bf16_to_float(p[i]);
    } else {
        memcpy(out, source, n * sizeof(float));
    }
}

/* One key or query row as words. */
static void to_words(const struct attention_args *a, const void *source, float *out) {
    if (uses_pairs(a)) {
        out[words_of(a) - 1] = 0.0f;
        memcpy(out, source, a->head_dim * sizeof(bf16));
    } else {
        widen(source, a->dtype, a->head_dim, out);
    }
}

#if HAVE_BF16_DOT
/* out[i * 64 + j] = rows[j][i] for 16 x 16 words. */
static inline void transpose_16x16(const float *const rows[16], float *out) {
    __m512i r[16], t[16];
    for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(rows[i]);
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        _mm512_store_si512(out + (i + 0) * CHUNK, _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88));
        _mm512_store_si512(out + (i + 4) * CHUNK, _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88));
        _mm512_store_si512(out + (i + 8) * CHUNK, _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd));
        _mm512_store_si512(out + (i + 12) * CHUNK, _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd));
    }
}
#endif

/* Keys of `count` positions, transposed. Lanes past `count` repeat the last key or keep old contents; they are masked. */
static void load_keys(const struct attention_args *a, int64_t head, const int32_t *slots, int count, float *keys) {
    const char *base = (const char *)a->k_cache + head * a->k_cache_head * item_size(a->dtype);
    const int64_t slot_bytes = a->k_cache_slot * item_size(a->dtype);
    const int64_t words = words_of(a);
    int64_t whole = 0; /* words moved 16 x 16 straight from the cache */
    int is_words = a->dtype == DTYPE_FLOAT32 || (uses_pairs(a) && a->head_dim % 2 == 0);
#if HAVE_BF16_DOT
    if (is_words) {
        whole = words / 16 * 16;
        for (int j = 0; j < count; j += 16) {
            const float *rows[16];
            for (int i = 0; i < 16; i++) {
                int position = j + i < count ? j + i : count - 1;
                rows[i] = (const float *)(base + slots[position] * slot_bytes);
            }
            for (int64_t w = 0; w < whole; w += 16) {
                transpose_16x16(rows, keys + w * CHUNK + j);
                for (int i = 0; i < 16; i++) rows[i] += 16;
            }
        }
    }
#endif
    if (whole == words) return;
    float row[words];
    for (int j = 0; j < count; j++) {
        const char *source = base + slots[j] * slot_bytes;
        if (is_words) {
            memcpy(row, source, words * sizeof(float));
        } else {
            to_words(a, source, row);
        }
        for (int64_t w = whole; w < words; w++) keys[w * CHUNK + j] = row[w];
    }
}

static void load_values(const struct attention_args *a, int64_t head, const int32_t *slots, int count, float *values) {
    const char *base = (const char *)a->v_cache + head * a->v_cache_head * item_size(a->dtype);
    const int64_t slot_bytes = a->v_cache_slot * item_size(a->dtype);
    const int64_t whole = a->v_head_dim / LANES * LANES, width = round_up(a->v_head_dim, LANES);
    for (int j = 0; j < count; j++) {
        const char *source = base + slots[j] * slot_bytes;
        float *out = values + j * width;
        if (a->dtype == DTYPE_BFLOAT16)
            for (int64_t e = 0; e < whole; e += LANES) {
                uint_vec bits = __builtin_convertvector(*(const bf16_vec *)(source + e * sizeof(bf16)), uint_vec);
                *(vec *)(out + e) = (vec)(bits << 16);
            }
        else
            memcpy(out, source, whole * sizeof(float));
        if (whole < width) {
            memset(out + whole, 0, LANES * sizeof(float));
            widen(source + whole * item_size(a->dtype), a->dtype, a->v_head_dim - whole, out + whole);
        }
    }
}

/* Start fetching the rows of a chunk: slots are scattered, so the processor cannot foresee them. All heads at once, which
 * lie side by side: the same thread takes the request's other heads next. */
static void prefetch_rows(const void *cache, int64_t slot_stride, int64_t width, int dtype, const int32_t *slots,
                          int count) {
    for (int j = 0; j < count; j++) {
        const char *row = (const char *)cache + slots[j] * slot_stride * item_size(dtype);
        for (int64_t byte = 0; byte < width * item_size(dtype); byte += 64) __builtin_prefetch(row + byte, 0, 2);
    }
}

static void prefetch_chunk(const struct attention_args *a, const int32_t *slots, int count) {
    prefetch_rows(a->k_cache, a->k_cache_slot, a->num_kv_heads * a->k_cache_head, a->dtype, slots, count);
    if (a->v_cache != a->k_cache)
        prefetch_rows(a->v_cache, a->v_cache_slot, a->num_kv_heads * a->v_cache_head, a->dtype, slots, count);
}

/* Unscaled scores of `lines` (a constant after inlining) lines against the chunk. */
static inline __attribute__((always_inline)) void score_lines(
    const int lines, const struct attention_args *a, const struct scratch *s, int64_t first) {
    const int64_t words = words_of(a);
    vec acc[4][4];
    for (int l = 0; l < lines; l++)
        for (int c = 0; c < 4; c++) acc[l][c] = (vec){0};
    const float *q = s->queries + first * words;
#if HAVE_BF16_DOT
    if (uses_pairs(a)) {
        for (int64_t w = 0; w < words; w++)
            for (int l = 0; l < lines; l++) {
                __m512bh query = (__m512bh)_mm512_set1_ps(q[l * words + w]);
                for (int c = 0; c < 4; c++) {
                    __m512bh key = (__m512bh)_mm512_load_ps(s->keys + w * CHUNK + c * LANES);
                    acc[l][c] = (vec)_mm512_dpbf16_ps((__m512)acc[l][c], query, key);
                }
            }
    } else
#endif
        for (int64_t w = 0; w < words; w++)
            for (int l = 0; l < lines; l++)
                for (int c = 0; c < 4; c++) acc[l][c] += *(const vec *)(s->keys + w * CHUNK + c * LANES) * q[l * words + w];
    for (int l = 0; l < lines; l++)
        for (int c = 0; c < 4; c++) *(vec *)(s->scores + (first + l) * CHUNK + c * LANES) = acc[l][c];
}

/* Every lane's value becomes the largest, or the sum, of all lanes; halves first, so the order is fixed. */
static inline vec largest_lane(vec x) {
    for (int step = LANES / 2; step; step /= 2) {
        vec other = __builtin_shuffle(x, lane_numbers ^ step);
        x = choose(other > x, other, x);
    }
    return x;
}

static inline vec sum_lanes(vec x) {
    for (int step = LANES / 2; step; step /= 2) x += __builtin_shuffle(x, lane_numbers ^ step);
    return x;
}

/* Scale, mask and exponentiate one line's scores in place, update its maximum and total, rescale its sums. */
static inline void soften_line(const struct attention_args *a, const struct scratch *s, int64_t line, int64_t begin) {
    vec *scores = (vec *)(s->scores + line * CHUNK);
    const int32_t visible = s->visible[line] - (int32_t)begin;
    if (visible <= 0) {
        memset(scores, 0, CHUNK * sizeof(float));
        return;
    }
    const vec minus_infinity = (vec){0} - INFINITY;
    vec masked[4];
    for (int c = 0; c < 4; c++) masked[c] = choose(lane_numbers + c * LANES < visible, scores[c] * a->scale, minus_infinity);
    vec top = masked[0];
    for (int c = 1; c < 4; c++) top = choose(masked[c] > top, masked[c], top);
    const float old_max = s->max[line], chunk_max = largest_lane(top)[0];
    const float new_max = chunk_max > old_max ? chunk_max : old_max;
    vec total = {0};
    for (int c = 0; c < 4; c++) {
        scores[c] = exp_lanes(masked[c] - new_max);
        total += scores[c];
    }
    if (new_max != old_max) {
        const float decay = fast_exp(old_max - new_max);
        const int64_t width = round_up(a->v_head_dim, LANES);
        s->max[line] = new_max;
        s->total[line] *= decay;
        for (int64_t e = 0; e < width; e += LANES) *(vec *)(s->sums + line * width + e) *= decay;
    }
    s->total[line] += sum_lanes(total)[0];
}

/* sums += probabilities x values for `lines` lines and `columns` vectors of the value, both constants after inlining. */
static inline __attribute__((always_inline)) void add_values(
    const int lines, const int columns, const struct scratch *s, int64_t first, int64_t e, int64_t width, int count) {
    vec acc[4][4];
    for (int l = 0; l < lines; l++)
        for (int c = 0; c < columns; c++) acc[l][c] = *(vec *)(s->sums + (first + l) * width + e + c * LANES);
    const float *p = s->scores + first * CHUNK;
    const float *values = s->values + e;
    for (int j = 0; j < count; j++, values += width)
        for (int l = 0; l < lines; l++)
            for (int c = 0; c < columns; c++) acc[l][c] += *(const vec *)(values + c * LANES) * p[l * CHUNK + j];
    for (int l = 0; l < lines; l++)
        for (int c = 0; c < columns; c++) *(vec *)(s->sums + (first + l) * width + e + c * LANES) = acc[l][c];
}

static inline __attribute__((always_inline)) void chunk_lines(
    const int lines, const struct attention_args *a, const struct scratch *s, int64_t first, int64_t begin, int count) {
    const int64_t width = round_up(a->v_head_dim, LANES);
    score_lines(lines, a, s, first);
    for (int l = 0; l < lines; l++) soften_line(a, s, first + l, begin);
    int64_t e = 0;
    for (; e + 4 * LANES <= width; e += 4 * LANES) add_values(lines, 4, s, first, e, width, count);
    for (; e + 2 * LANES <= width; e += 2 * LANES) add_values(lines, 2, s, first, e, width, count);
    for (; e < width; e += LANES) add_values(lines, 1, s, first, e, width, count);
}

static void run_task(const struct attention_args *a, const struct scratch *s, int64_t request, int64_t first_row,
                     int64_t num_rows, int64_t kv_head, int fetch) {
    const int64_t group = a->num_heads / a->num_kv_heads;
    const int64_t lines = num_rows * group;
    const int64_t width = round_up(a->v_head_dim, LANES);
    const int64_t extend = a->query_start[request + 1] - a->query_start[request];
    const int64_t token = a->query_start[request] + first_row;
    const int64_t first_visible = a->seq_lens[request] - extend + first_row + 1;
    const int32_t *slots = a->request_table + a->request_rows[request] * a->table_row;
    if (fetch) prefetch_chunk(a, slots, (int)(first_visible < CHUNK ? first_visible : CHUNK));
    for (int64_t line = 0; line < lines; line++) {
        int64_t row = token + line / group, head = kv_head * group + line % group;
        to_words(a, (const char *)a->q + (row * a->q_row + head * a->q_head) * item_size(a->dtype),
                 s->queries + line * words_of(a));
        s->max[line] = -INFINITY;
        s->total[line] = 0.0f;
        s->visible[line] = (int32_t)(first_visible + line / group);
    }
    memset(s->sums, 0, lines * width * sizeof(float));
    const int64_t end = first_visible + num_rows - 1;
    for (int64_t begin = 0; begin < end; begin += CHUNK) {
        int count = (int)(end - begin < CHUNK ? end - begin : CHUNK);
        load_keys(a, kv_head, slots + begin, count, s->keys);
        load_values(a, kv_head, slots + begin, count, s->values);
        const int32_t *next = slots + begin + CHUNK;
        int ahead = (int)(end - begin - CHUNK < CHUNK ? end - begin - CHUNK : CHUNK);
        if (fetch && ahead > 0) prefetch_chunk(a, next, ahead);
        int64_t line = 0;
        for (; line + 4 <= lines; line += 4) chunk_lines(4, a, s, line, begin, count);
        switch (lines - line) {
            case 3: chunk_lines(3, a, s, line, begin, count); break;
            case 2: chunk_lines(2, a, s, line, begin, count); break;
            case 1: chunk_lines(1, a, s, line, begin, count); break;
            default: break;
        }
    }
    for (int64_t line = 0; line < lines; line++) {
        int64_t row = token + line / group, head = kv_head * group + line % group;
        int64_t offset = (row * a->num_heads + head) * a->v_head_dim;
        const float *sums = s->sums + line * width;
        float factor = 1.0f / s->total[line];
        if (a->dtype == DTYPE_BFLOAT16)
            for (int64_t e = 0; e < a->v_head_dim; e++) store_bf16((bf16 *)a->out + offset + e, sums[e] * factor);
        else
            for (int64_t e = 0; e < a->v_head_dim; e++) store_float((float *)a->out + offset + e, sums[e] * factor);
    }
}

/* Bytes of one task's scratch; with `base` also its parts. */
static int64_t carve_scratch(const struct attention_args *a, char *base, struct scratch *s) {
    const int64_t lines = a->rows_per_task * (a->num_heads / a->num_kv_heads);
    const int64_t width = round_up(a->v_head_dim, LANES), words = words_of(a);
    const int64_t sizes[8] = {words * CHUNK, CHUNK * width, lines * words, lines * CHUNK, lines * width, lines, lines, lines};
    void *parts[8];
    int64_t offset = 0;
    for (int i = 0; i < 8; i++) {
        parts[i] = base + offset;
        offset += round_up(sizes[i] * (int64_t)sizeof(float), 64);
    }
    if (base)
        *s = (struct scratch){parts[0], parts[1], parts[2], parts[3], parts[4], parts[5], parts[6], parts[7]};
    return offset;
}

static void write_rows(const struct attention_args *a, int64_t token) {
    const int64_t item = item_size(a->dtype);
    const int64_t slot = a->slots[token];
    for (int64_t head = 0; head < a->num_kv_heads; head++) {
        memcpy((char *)a->k_cache + (slot * a->k_cache_slot + head * a->k_cache_head) * item,
               (const char *)a->k + (token * a->k_row + head * a->k_head) * item, a->head_dim * item);
        if (a->v)
            memcpy((char *)a->v_cache + (slot * a->v_cache_slot + head * a->v_cache_head) * item,
                   (const char *)a->v + (token * a->v_row + head * a->v_head) * item, a->v_head_dim * item);
    }
}

/* Write the new rows, then attend. Returns 0, or 1 when scratch memory could not be had. */
EXPORT int lockstep_attention(const struct attention_args *a) {
    /* Waking the threads costs more than copying a few rows. */
#pragma omp parallel for schedule(static) num_threads(a->num_threads) if (a->num_tokens > 64)
    for (int64_t token = 0; token < a->num_tokens; token++) write_rows(a, token);

    /* With enough requests a thread takes all heads of one, and the first head fetches for the others. */
    const int together = a->num_tasks >= 2 * a->num_threads ? (int)a->num_kv_heads : 1;
    int failed = 0;
    const int64_t bytes = carve_scratch(a, NULL, NULL);
#pragma omp parallel num_threads(a->num_threads)
    {
        char *base = aligned_alloc(64, bytes);
        struct scratch s;
        if (base)
            carve_scratch(a, base, &s);
        else
#pragma omp atomic write
            failed = 1;
#pragma omp for schedule(dynamic, together)
        for (int64_t index = 0; index < a->num_tasks * a->num_kv_heads; index++) {
            if (!base) continue;
            int64_t task = index / a->num_kv_heads, request = task, first_row = 0;
            if (a->tasks) {
                request = a->tasks[2 * task];
                first_row = a->tasks[2 * task + 1];
            }
            int64_t rows = a->query_start[request + 1] - a->query_start[request] - first_row;
            run_task(a, &s, request, first_row, rows < a->rows_per_task ? rows : a->rows_per_task, index % a->num_kv_heads,
                     index % together == 0);
        }
        free(base);
    }
    return failed;
}
