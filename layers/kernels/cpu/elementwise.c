/* Row-wise layers: RMS norm, SiLU gate, rotary positions, argmax, penalties. Arithmetic in float32; strides count elements. */
#include "common.h"

/* Below this many elements one thread is faster than waking the others. */
#define PARALLEL_ELEMENTS 65536

/* y = x / sqrt(mean(x^2) + eps) * weight, where x is first added to `residual` (kept there, rounded) if there is one. */
#define DEFINE_RMS_NORM(TYPE, FORMAT)                                                                                    \
    static void rms_norm_##FORMAT(const TYPE *x, TYPE *residual, const TYPE *weight, float eps, int64_t n, TYPE *y) {    \
        vec squares = {0};                                                                                               \
        float total = 0.0f;                                                                                              \
        int64_t i = 0;                                                                                                   \
        for (; i + LANES <= n; i += LANES) {                                                                             \
            vec value = load_##FORMAT##_lanes(x + i);                                                                    \
            if (residual) {                                                                                              \
                value = round_##FORMAT##_lanes(value + load_##FORMAT##_lanes(residual + i));                             \
                store_##FORMAT##_lanes(residual + i, value);                                                             \
            }                                                                                                            \
            squares += value * value;                                                                                    \
        }                                                                                                                \
        for (; i < n; i++) {                                                                                             \
            float value = load_##FORMAT(x + i);                                                                          \
            if (residual) {                                                                                              \
                value = round_##FORMAT(value + load_##FORMAT(residual + i));                                             \
                store_##FORMAT(residual + i, value);                                                                     \
            }                                                                                                            \
            total += value * value;                                                                                      \
        }                                                                                                                \
        for (int lane = 0; lane < LANES; lane++) total += squares[lane];                                                 \
        const float factor = 1.0f / sqrtf(total / (float)n + eps);                                                       \
        if (residual) x = residual;                                                                                      \
        for (i = 0; i + LANES <= n; i += LANES)                                                                          \
            store_##FORMAT##_lanes(y + i,                                                                                \
                                   load_##FORMAT##_lanes(x + i) * factor * load_##FORMAT##_lanes(weight + i));           \
        for (; i < n; i++) store_##FORMAT(y + i, load_##FORMAT(x + i) * factor * load_##FORMAT(weight + i));             \
    }

DEFINE_RMS_NORM(float, float)
DEFINE_RMS_NORM(bf16, bf16)

/* x holds `heads` runs of n numbers in each of its rows, x_head apart; residual and y have a row for each of them. */
EXPORT void lockstep_rms_norm(const void *x, int64_t x_row, int64_t x_head, int64_t heads, void *residual, int64_t ldr,
                              const void *weight, float eps, int64_t rows, int64_t n, void *y, int64_t ldy, int dtype,
                              int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (rows * heads * n > PARALLEL_ELEMENTS)
    for (int64_t run = 0; run < rows * heads; run++) {
        const int64_t at = run / heads * x_row + run % heads * x_head;
        if (dtype == DTYPE_BFLOAT16)
            rms_norm_bf16((const bf16 *)x + at, residual ? (bf16 *)residual + run * ldr : NULL, weight, eps, n,
                          (bf16 *)y + run * ldy);
        else
            rms_norm_float((const float *)x + at, residual ? (float *)residual + run * ldr : NULL, weight, eps, n,
                           (float *)y + run * ldy);
    }
}

/* y = silu(gate) * up of n numbers, silu rounded to the element type first as two torch operations do. */
#define DEFINE_SILU_AND_MUL(TYPE, FORMAT)                                                                                \
    static void silu_and_mul_##FORMAT(const TYPE *gate, const TYPE *up, int64_t n, TYPE *y) {                            \
        int64_t i = 0;                                                                                                   \
        for (; i + LANES <= n; i += LANES)                                                                               \
            store_##FORMAT##_lanes(y + i, round_##FORMAT##_lanes(silu_lanes(load_##FORMAT##_lanes(gate + i))) *          \
                                              load_##FORMAT##_lanes(up + i));                                            \
        for (; i < n; i++)                                                                                               \
            store_##FORMAT(y + i, round_##FORMAT(silu(load_##FORMAT(gate + i))) * load_##FORMAT(up + i));                \
    }

DEFINE_SILU_AND_MUL(float, float)
DEFINE_SILU_AND_MUL(bf16, bf16)

/* y[row, i] = silu(x[row, i]) * x[row, n + i]. */
EXPORT void lockstep_silu_and_mul(const void *x, int64_t ldx, int64_t rows, int64_t n, void *y, int64_t ldy, int dtype,
                                  int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (rows * n > PARALLEL_ELEMENTS)
    for (int64_t row = 0; row < rows; row++) {
        if (dtype == DTYPE_BFLOAT16) {
            const bf16 *gate = (const bf16 *)x + row * ldx;
            silu_and_mul_bf16(gate, gate + n, n, (bf16 *)y + row * ldy);
        } else {
            const float *gate = (const float *)x + row * ldx;
            silu_and_mul_float(gate, gate + n, n, (float *)y + row * ldy);
        }
    }
}

/* Heads of rows rotated by [cosines | sines] of width d, float32: pairs (i, i + d / 2), or (2 i, 2 i + 1) if interleaved.
 * Reads strided heads, writes [rows, heads, d] contiguous. */
#define DEFINE_ROTATE(TYPE, FORMAT)                                                                                      \
    static void rotate_##FORMAT(const TYPE *x, int64_t row_stride, int64_t head_stride, int64_t row, int64_t heads,      \
                                int64_t d, const float *cos_sin, int interleaved, TYPE *out) {                           \
        const int64_t half = d / 2, apart = interleaved ? 1 : half, step = interleaved ? 2 : 1;                          \
        const float *cosines = cos_sin, *sines = cos_sin + half;                                                         \
        for (int64_t head = 0; head < heads; head++) {                                                                   \
            const TYPE *source = x + row * row_stride + head * head_stride;                                              \
            TYPE *target = out + (row * heads + head) * d;                                                               \
            int64_t i = 0;                                                                                               \
            for (; !interleaved && i + LANES <= half; i += LANES) {                                                      \
                vec a = load_##FORMAT##_lanes(source + i), b = load_##FORMAT##_lanes(source + i + half);                 \
                vec cosine = load_float_lanes(cosines + i), sine = load_float_lanes(sines + i);                          \
                store_##FORMAT##_lanes(target + i, a * cosine - b * sine);                                               \
                store_##FORMAT##_lanes(target + i + half, b * cosine + a * sine);                                        \
            }                                                                                                            \
            for (; i < half; i++) {                                                                                      \
                float a = load_##FORMAT(source + i * step), b = load_##FORMAT(source + i * step + apart);                \
                store_##FORMAT(target + i * step, a * cosines[i] - b * sines[i]);                                        \
                store_##FORMAT(target + i * step + apart, b * cosines[i] + a * sines[i]);                                \
            }                                                                                                            \
        }                                                                                                                \
    }

DEFINE_ROTATE(float, float)
DEFINE_ROTATE(bf16, bf16)

EXPORT void lockstep_rotary(const void *q, int64_t q_row, int64_t q_head, int64_t q_heads, const void *k, int64_t k_row,
                            int64_t k_head, int64_t k_heads, const float *cos_sin, int64_t cos_sin_row, int64_t rows,
                            int64_t d, int interleaved, void *q_out, void *k_out, int dtype, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (rows * (q_heads + k_heads) * d > PARALLEL_ELEMENTS)
    for (int64_t row = 0; row < rows; row++) {
        const float *angles = cos_sin + row * cos_sin_row;
        if (dtype == DTYPE_BFLOAT16) {
            rotate_bf16(q, q_row, q_head, row, q_heads, d, angles, interleaved, q_out);
            rotate_bf16(k, k_row, k_head, row, k_heads, d, angles, interleaved, k_out);
        } else {
            rotate_float(q, q_row, q_head, row, q_heads, d, angles, interleaved, q_out);
            rotate_float(k, k_row, k_head, row, k_heads, d, angles, interleaved, k_out);
        }
    }
}

/* Index of the first largest of n numbers; a NaN counts as larger than any. */
static int64_t argmax_row(const float *x, int64_t n) {
    vec best = (vec){0} - INFINITY;
    int_vec at = lane_numbers, position = lane_numbers;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES, position += LANES) {
        const vec value = *(const unaligned_vec *)(x + i);
        const int_vec held = (value > best) | ((value != value) & (best == best));
        best = choose(held, value, best);
        at = (held & position) | (~held & at);
    }
    int64_t first = at[0];
    for (int lane = 1; lane < LANES && lane < n; lane++) {
        const float a = x[at[lane]], b = x[first];
        if (a > b || (a != a && b == b) || ((a == b || (a != a && b != b)) && at[lane] < first)) first = at[lane];
    }
    for (; i < n; i++)
        if (x[i] > x[first] || (x[i] != x[i] && x[first] == x[first])) first = i;
    return first;
}

/* index[row] of the first largest number of each row, finite[row] whether that number is neither infinite nor NaN. */
EXPORT void lockstep_argmax(const float *x, int64_t ldx, int64_t rows, int64_t n, int64_t *index, uint8_t *finite,
                            int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (rows * n > PARALLEL_ELEMENTS)
    for (int64_t row = 0; row < rows; row++) {
        index[row] = argmax_row(x + row * ldx, n);
        finite[row] = isfinite(x[row * ldx + index[row]]) != 0;
    }
}

/* Counts passed over together where all of them are 0. */
#define COUNT_BLOCK 64

static void penalize_row(float *logits, const int32_t *counts, int64_t n, int32_t output_bits, const float *penalties) {
    const float frequency = penalties[0], presence = penalties[1], repetition = penalties[2];
    for (int64_t start = 0; start < n; start += COUNT_BLOCK) {
        const int64_t end = start + COUNT_BLOCK < n ? start + COUNT_BLOCK : n;
        int32_t any = 0;
        for (int64_t i = start; i < end; i++) any |= counts[i];
        if (!any) continue;
        for (int64_t i = start; i < end; i++) {
            if (!counts[i]) continue;
            const int32_t in_output = counts[i] & output_bits;
            const float logit = logits[i] > 0.0f ? logits[i] / repetition : logits[i] * repetition;
            logits[i] = logit - frequency * (float)in_output - (in_output ? presence : 0.0f);
        }
    }
}

/* Changes row rows[i] of the logits by row slots[i] of the counts and by penalties[i] (frequency, presence, repetition),
 * where the count is not 0. output_bits: those bits of a count that count the output. */
EXPORT void lockstep_penalize(float *logits, int64_t logits_row, const int32_t *counts, int64_t counts_row,
                              const int64_t *rows, const int64_t *slots, const float *penalties, int64_t num_rows,
                              int64_t n, int32_t output_bits, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_rows * n > PARALLEL_ELEMENTS)
    for (int64_t i = 0; i < num_rows; i++)
        penalize_row(logits + rows[i] * logits_row, counts + slots[i] * counts_row, n, output_bits, penalties + 3 * i);
}
