/* Causal attention over keys and values scattered in slots, for prefill with prefix and for decode alike.
 *
 * A task is a few query rows of one request with one or all key/value heads ("lines": every query head of every row).
 * It walks the visible positions in chunks of 64 from position 0, for each key/value head: the chunk's keys are
 * transposed so that lanes are positions, values are widened to float32, and the softmax is kept online. A line's
 * arithmetic depends only on its own visible positions, never on the other lines, so decode, prefill and any batch give
 * the same bits.
 */
#include "common.h"

#define CHUNK 64
#define BLOCK_LINES 4  /* lines computed together */
#define FETCH_EVERY 16 /* positions computed between two lots of rows to be fetched */

/* One call. Strides count elements. Mirrored field by field in __init__.py. */
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

/* Rows of one request with some of its key/value heads. Lines go by key/value head, then row, then query head. */
struct task {
    const int32_t *slots;  /* of the request's positions */
    int64_t token, rows;   /* first row's place in the batch, number of rows */
    int64_t visible;       /* positions that the first row sees */
    int64_t head, heads;   /* first key/value head, number of them */
};

/* Cached rows that will be needed next. Slots are scattered, so the processor cannot foresee them; they are asked for
 * a few at a time between pieces of arithmetic, so that neither memory nor arithmetic waits for the other. */
struct fetch {
    const int32_t *slots;
    int64_t count, step; /* positions left, and to ask for at a time */
    int64_t head, heads;
};

/* Per-thread scratch of one task. */
struct scratch {
    float *keys;      /* [words, 64]: word w of position j at [w][j]; a word is a float or, with bf16 dot products, a pair */
    float *values;    /* [64, padded v_head_dim]; not used for few lines */
    float *queries;   /* [lines, words] */
    float *scores;    /* [BLOCK_LINES, 64] */
    float *sums;      /* [lines, padded v_head_dim] */
    float *max, *total; /* [lines] */
    int32_t *visible;   /* [lines] positions each line sees */
};

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
/* out[i * 64 + j] = rows[j][i] for 16 x 16 words. Four rows' quarters are brought together by the loads, which leaves
 * a transpose within each quarter of a register. */
static inline void transpose_16x16(const float *const rows[16], float *out) {
    for (int word = 0; word < 16; word += 4) {
        __m512i r[4], t[4];
        for (int i = 0; i < 4; i++) {
            r[i] = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(rows[i] + word)));
            r[i] = _mm512_inserti32x4(r[i], _mm_loadu_si128((const __m128i *)(rows[i + 4] + word)), 1);
            r[i] = _mm512_inserti32x4(r[i], _mm_loadu_si128((const __m128i *)(rows[i + 8] + word)), 2);
            r[i] = _mm512_inserti32x4(r[i], _mm_loadu_si128((const __m128i *)(rows[i + 12] + word)), 3);
        }
        for (int i = 0; i < 2; i++) {
            t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
            t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
        }
        for (int i = 0; i < 2; i++) {
            _mm512_store_si512(out + (word + 2 * i) * CHUNK, _mm512_unpacklo_epi64(t[i], t[i + 2]));
            _mm512_store_si512(out + (word + 2 * i + 1) * CHUNK, _mm512_unpackhi_epi64(t[i], t[i + 2]));
        }
    }
}
#endif

static inline void fetch_row(const void *cache, int64_t slot_stride, int64_t head_stride, int dtype, int32_t slot,
                             const struct fetch *f) {
    const char *row = (const char *)cache + (slot * slot_stride + f->head * head_stride) * item_size(dtype);
    const int64_t bytes = f->heads * head_stride * item_size(dtype);
    for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(row + byte, 0, 2);
}

static inline void fetch_some(const struct attention_args *a, struct fetch *f) {
    for (int64_t i = 0; i < f->step && f->count; i++, f->count--, f->slots++) {
        fetch_row(a->k_cache, a->k_cache_slot, a->k_cache_head, a->dtype, *f->slots, f);
        if (a->v_cache != a->k_cache) fetch_row(a->v_cache, a->v_cache_slot, a->v_cache_head, a->dtype, *f->slots, f);
    }
}

static inline void fetch_rest(const struct attention_args *a, struct fetch *f) {
    f->step = f->count;
    fetch_some(a, f);
}

/* Keys of `count` positions, transposed. Lanes past `count` repeat the last key or keep old contents; they are masked. */
static void load_keys(const struct attention_args *a, int64_t head, const int32_t *slots, int count, float *keys,
                      struct fetch *f) {
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
            fetch_some(a, f);
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
        if (!whole && j % FETCH_EVERY == 0) fetch_some(a, f);
        const char *source = base + slots[j] * slot_bytes;
        if (is_words) {
            memcpy(row, source, words * sizeof(float));
        } else {
            to_words(a, source, row);
        }
        for (int64_t w = whole; w < words; w++) keys[w * CHUNK + j] = row[w];
    }
}

/* Numbers [e, e + 16) of a cached row as float32. */
static inline vec load_lanes(const struct attention_args *a, const char *row, int64_t e) {
    if (a->dtype == DTYPE_BFLOAT16) return load_bf16_lanes((const bf16 *)row + e);
    return load_float_lanes((const float *)row + e);
}

static void load_values(const struct attention_args *a, int64_t head, const int32_t *slots, int count, float *values,
                        struct fetch *f) {
    const char *base = (const char *)a->v_cache + head * a->v_cache_head * item_size(a->dtype);
    const int64_t slot_bytes = a->v_cache_slot * item_size(a->dtype);
    const int64_t whole = a->v_head_dim / LANES * LANES, width = round_up(a->v_head_dim, LANES);
    for (int j = 0; j < count; j++) {
        if (j % FETCH_EVERY == 0) fetch_some(a, f);
        const char *source = base + slots[j] * slot_bytes;
        float *out = values + j * width;
        for (int64_t e = 0; e < whole; e += LANES) *(vec *)(out + e) = load_lanes(a, source, e);
        if (whole < width) {
            memset(out + whole, 0, LANES * sizeof(float));
            widen(source + whole * item_size(a->dtype), a->dtype, a->v_head_dim - whole, out + whole);
        }
    }
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
        for (int c = 0; c < 4; c++) *(vec *)(s->scores + l * CHUNK + c * LANES) = acc[l][c];
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
static inline void soften_line(const struct attention_args *a, const struct scratch *s, int64_t line, vec *scores,
                               int64_t begin) {
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

/* sums += probabilities x values for `lines` lines and `columns` vectors of the value, both constants after inlining.
 * cached (a constant too): the values are read from the cache, which pays when there are few lines. */
static inline __attribute__((always_inline)) void add_values(
    const int lines, const int columns, const int cached, const struct attention_args *a, const struct scratch *s,
    int64_t first, int64_t e, const char *base, const int32_t *slots, int count, struct fetch *f) {
    const int64_t width = round_up(a->v_head_dim, LANES), slot_bytes = a->v_cache_slot * item_size(a->dtype);
    vec acc[BLOCK_LINES][4];
    for (int l = 0; l < lines; l++)
        for (int c = 0; c < columns; c++) acc[l][c] = *(vec *)(s->sums + (first + l) * width + e + c * LANES);
    for (int j = 0; j < count; j++) {
        if (cached && j % FETCH_EVERY == 0) fetch_some(a, f);
        for (int c = 0; c < columns; c++) {
            const int64_t at = e + c * LANES;
            vec value = cached ? load_lanes(a, base + slots[j] * slot_bytes, at)
                               : *(const vec *)(s->values + j * width + at);
            for (int l = 0; l < lines; l++) acc[l][c] += value * s->scores[l * CHUNK + j];
        }
    }
    for (int l = 0; l < lines; l++)
        for (int c = 0; c < columns; c++) *(vec *)(s->sums + (first + l) * width + e + c * LANES) = acc[l][c];
}

static inline __attribute__((always_inline)) void chunk_lines(
    const int lines, const int cached, const struct attention_args *a, const struct scratch *s, int64_t first,
    int64_t begin, const char *base, const int32_t *slots, int count, struct fetch *f) {
    const int64_t width = round_up(a->v_head_dim, LANES);
    score_lines(lines, a, s, first);
    for (int l = 0; l < lines; l++) soften_line(a, s, first + l, (vec *)(s->scores + l * CHUNK), begin);
    int64_t e = 0;
    for (; e + 4 * LANES <= width; e += 4 * LANES) add_values(lines, 4, cached, a, s, first, e, base, slots, count, f);
    for (; e + 2 * LANES <= width; e += 2 * LANES) add_values(lines, 2, cached, a, s, first, e, base, slots, count, f);
    for (; e < width; e += LANES) add_values(lines, 1, cached, a, s, first, e, base, slots, count, f);
}

/* Lines [first, first + lines) of one key/value head against the chunk at `begin`. */
static void run_chunk(const struct attention_args *a, const struct scratch *s, int64_t head, int64_t first,
                      int64_t lines, const int32_t *slots, int64_t begin, int count, struct fetch *f) {
    const char *base = (const char *)a->v_cache + head * a->v_cache_head * item_size(a->dtype);
    load_keys(a, head, slots, count, s->keys, f);
    if (lines <= BLOCK_LINES && a->v_head_dim % LANES == 0) {
        switch (lines) {
            case 4: chunk_lines(4, 1, a, s, first, begin, base, slots, count, f); break;
            case 3: chunk_lines(3, 1, a, s, first, begin, base, slots, count, f); break;
            case 2: chunk_lines(2, 1, a, s, first, begin, base, slots, count, f); break;
            default: chunk_lines(1, 1, a, s, first, begin, base, slots, count, f); break;
        }
        return;
    }
    load_values(a, head, slots, count, s->values, f);
    int64_t line = first, end = first + lines;
    for (; line + 4 <= end; line += 4) chunk_lines(4, 0, a, s, line, begin, base, slots, count, f);
    switch (end - line) {
        case 3: chunk_lines(3, 0, a, s, line, begin, base, slots, count, f); break;
        case 2: chunk_lines(2, 0, a, s, line, begin, base, slots, count, f); break;
        case 1: chunk_lines(1, 0, a, s, line, begin, base, slots, count, f); break;
        default: break;
    }
}

/* Task number `index` of `heads` key/value heads each; false past the last. */
static int find_task(const struct attention_args *a, int64_t index, int64_t heads, struct task *t) {
    const int64_t parts = a->num_kv_heads / heads;
    if (index >= a->num_tasks * parts) return 0;
    int64_t request = index / parts, first_row = 0;
    if (a->tasks) {
        const int32_t *entry = a->tasks + 2 * request;
        request = entry[0];
        first_row = entry[1];
    }
    const int64_t start = a->query_start[request], extend = a->query_start[request + 1] - start;
    const int64_t rows = extend - first_row;
    *t = (struct task){
        .slots = a->request_table + a->request_rows[request] * a->table_row,
        .token = start + first_row,
        .rows = rows < a->rows_per_task ? rows : a->rows_per_task,
        .visible = a->seq_lens[request] - extend + first_row + 1,
        .head = index % parts * heads,
        .heads = heads,
    };
    return 1;
}

/* The number of the next task that nobody has taken. */
static int64_t take_task(int64_t *taken) {
    int64_t index;
#pragma omp atomic capture
    index = (*taken)++;
    return index;
}

/* Positions that one line at least sees. */
static inline int64_t length_of(const struct task *t) { return t->visible + t->rows - 1; }

/* The task's chunk at `begin`, to be fetched while another one is computed. */
static struct fetch chunk_to_fetch(const struct task *t, int64_t begin) {
    const int64_t left = length_of(t) - begin;
    const int64_t lots = t->heads * 2 * CHUNK / FETCH_EVERY; /* keys and values of each head */
    return (struct fetch){t->slots + begin, left < CHUNK ? left : CHUNK, (CHUNK + lots - 1) / lots, t->head, t->heads};
}

static void begin_lines(const struct attention_args *a, const struct scratch *s, const struct task *t) {
    const int64_t group = a->num_heads / a->num_kv_heads, words = words_of(a), item = item_size(a->dtype);
    int64_t line = 0;
    for (int64_t head = t->head; head < t->head + t->heads; head++)
        for (int64_t row = 0; row < t->rows; row++)
            for (int64_t i = 0; i < group; i++, line++) {
                int64_t offset = (t->token + row) * a->q_row + (head * group + i) * a->q_head;
                to_words(a, (const char *)a->q + offset * item, s->queries + line * words);
                s->max[line] = -INFINITY;
                s->total[line] = 0.0f;
                s->visible[line] = (int32_t)(t->visible + row);
            }
    memset(s->sums, 0, line * round_up(a->v_head_dim, LANES) * sizeof(float));
}

static void end_lines(const struct attention_args *a, const struct scratch *s, const struct task *t) {
    const int64_t group = a->num_heads / a->num_kv_heads, width = round_up(a->v_head_dim, LANES);
    int64_t line = 0;
    for (int64_t head = t->head; head < t->head + t->heads; head++)
        for (int64_t row = 0; row < t->rows; row++)
            for (int64_t i = 0; i < group; i++, line++) {
                int64_t offset = ((t->token + row) * a->num_heads + head * group + i) * a->v_head_dim;
                const float *sums = s->sums + line * width;
                float factor = 1.0f / s->total[line];
                if (a->dtype == DTYPE_BFLOAT16)
                    for (int64_t e = 0; e < a->v_head_dim; e++) store_bf16((bf16 *)a->out + offset + e, sums[e] * factor);
                else
                    for (int64_t e = 0; e < a->v_head_dim; e++) store_float((float *)a->out + offset + e, sums[e] * factor);
            }
}

/* One row's new key and value to its slot. */
static void write_row(const struct attention_args *a, int64_t token) {
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

/* Tasks of `heads` key/value heads until none is left; `taken` counts those that some thread has begun.
 * write: each task first writes its new row, which only it reads. */
static void run_tasks(const struct attention_args *a, const struct scratch *s, int64_t heads, int write, int64_t *taken) {
    const int64_t group = a->num_heads / a->num_kv_heads;
    struct task t, next = {0};
    int more = find_task(a, take_task(taken), heads, &t);
    struct fetch f = {0};
    if (more) {
        f = chunk_to_fetch(&t, 0);
        fetch_rest(a, &f);
    }
    while (more) {
        if (write) write_row(a, t.token);
        begin_lines(a, s, &t);
        const int64_t end = length_of(&t);
        int64_t begin = 0;
        do {
            if (begin + CHUNK < end)
                f = chunk_to_fetch(&t, begin + CHUNK);
            else if ((more = find_task(a, take_task(taken), heads, &next)))
                f = chunk_to_fetch(&next, 0);
            int count = (int)(end - begin < CHUNK ? end - begin : CHUNK);
            for (int64_t i = 0; i < heads; i++)
                run_chunk(a, s, t.head + i, i * t.rows * group, t.rows * group, t.slots + begin, begin, count, &f);
            fetch_rest(a, &f);
            begin += CHUNK;
        } while (begin < end);
        end_lines(a, s, &t);
        t = next;
    }
}

/* Bytes of one task's scratch; with `base` also its parts. */
static int64_t carve_scratch(const struct attention_args *a, int64_t heads, char *base, struct scratch *s) {
    const int64_t lines = a->rows_per_task * heads * (a->num_heads / a->num_kv_heads);
    const int64_t width = round_up(a->v_head_dim, LANES), words = words_of(a);
    const int64_t sizes[8] = {
        words * CHUNK, CHUNK * width, lines * words, BLOCK_LINES * CHUNK, lines * width, lines, lines, lines,
    };
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

/* Write the new rows, then attend. Returns 0, or 1 when scratch memory could not be had. */
EXPORT int lockstep_attention(const struct attention_args *a) {
    /* With enough decoding requests a thread takes all heads of one: their rows lie side by side. */
    const int whole = !a->tasks && a->num_tasks >= 2 * a->num_threads;
    const int64_t heads = whole ? a->num_kv_heads : 1;
    if (!whole) {
        /* Waking the threads costs more than copying a few rows. */
#pragma omp parallel for schedule(static) num_threads(a->num_threads) if (a->num_tokens > 64)
        for (int64_t token = 0; token < a->num_tokens; token++) write_row(a, token);
    }
    const int64_t bytes = carve_scratch(a, heads, NULL, NULL);
    int64_t taken = 0;
    int failed = 0;
#pragma omp parallel num_threads(a->num_threads)
    {
        char *base = aligned_alloc(64, bytes);
        struct scratch s;
        if (base) {
            carve_scratch(a, heads, base, &s);
            run_tasks(a, &s, heads, whole, &taken);
        } else {
#pragma omp atomic write
            failed = 1;
        }
        free(base);
    }
    return failed;
}
