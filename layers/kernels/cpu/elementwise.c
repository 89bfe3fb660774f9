/* Row-wise layers: RMS norm, SiLU gate, rotary positions, argmax. Arithmetic in float32; strides count elements. */
#include "common.h"

/* Below this many elements one thread is faster than waking the others. */
#define PARALLEL_ELEMENTS 16384

/* y = x / sqrt(mean(x^2) + eps) * weight, where x is first added to `residual` (kept there, rounded) if there is one. */
#define DEFINE_RMS_NORM(NAME, TYPE, LOAD, STORE)                                                                         \
    static void NAME##_row(const TYPE *x, TYPE *residual, const TYPE *weight, float eps, int64_t n, TYPE *y) {           \
        float lanes[16] ALIGNED = {0};                                                                                   \
        float total = 0.0f;                                                                                              \
        if (residual) {                                                                                                  \
            for (int64_t i = 0; i < n; i++) STORE(residual + i, LOAD(residual + i) + LOAD(x + i));                       \
            x = residual;                                                                                                \
        }                                                                                                                \
        int64_t i = 0;                                                                                                   \
        for (; i + 16 <= n; i += 16)                                                                                     \
            for (int j = 0; j < 16; j++) lanes[j] += LOAD(x + i + j) * LOAD(x + i + j);                                  \
        for (; i < n; i++) total += LOAD(x + i) * LOAD(x + i);                                                           \
        for (int j = 0; j < 16; j++) total += lanes[j];                                                                  \
        const float factor = 1.0f / sqrtf(total / (float)n + eps);                                                       \
        for (i = 0; i < n; i++) STORE(y + i, LOAD(x + i) * factor * LOAD(weight + i));                                   \
    }                                                                                                                    \
    static void NAME(const TYPE *x, int64_t ldx, TYPE *residual, int64_t ldr, const TYPE *weight, float eps,             \
                     int64_t rows, int64_t n, TYPE *y, int64_t ldy, int num_threads) {                                   \
        _Pragma("omp parallel for schedule(static) num_threads(num_threads) if (rows * n > PARALLEL_ELEMENTS)")          \
        for (int64_t row = 0; row < rows; row++)                                                                         \
            NAME##_row(x + row * ldx, residual ? residual + row * ldr : NULL, weight, eps, n, y + row * ldy);            \
    }

DEFINE_RMS_NORM(rms_norm_float, float, load_float, store_float)
DEFINE_RMS_NORM(rms_norm_bf16, bf16, load_bf16, store_bf16)

EXPORT void lockstep_rms_norm(const void *x, int64_t ldx, void *residual, int64_t ldr, const void *weight, float eps,
                              int64_t rows, int64_t n, void *y, int64_t ldy, int dtype, int num_threads) {
    if (dtype == DTYPE_BFLOAT16)
        rms_norm_bf16(x, ldx, residual, ldr, weight, eps, rows, n, y, ldy, num_threads);
    else
        rms_norm_float(x, ldx, residual, ldr, weight, eps, rows, n, y, ldy, num_threads);
}

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
#define DEFINE_ROTATE(NAME, TYPE, LOAD, STORE)                                                                           \
    static void NAME(const TYPE *x, int64_t row_stride, int64_t head_stride, int64_t row, int64_t heads, int64_t d,      \
                     const float *cos_sin, int interleaved, TYPE *out) {                                                 \
        const int64_t half = d / 2, apart = interleaved ? 1 : half, step = interleaved ? 2 : 1;                          \
        const float *cosines = cos_sin, *sines = cos_sin + half;                                                         \
        for (int64_t head = 0; head < heads; head++) {                                                                   \
            const TYPE *restrict source = x + row * row_stride + head * head_stride;                                     \
            TYPE *restrict target = out + (row * heads + head) * d;                                                      \
            for (int64_t i = 0; i < half; i++) {                                                                         \
                float a = LOAD(source + i * step), b = LOAD(source + i * step + apart);                                  \
                STORE(target + i * step, a * cosines[i] - b * sines[i]);                                                 \
                STORE(target + i * step + apart, b * cosines[i] + a * sines[i]);                                         \
            }                                                                                                            \
        }                                                                                                                \
    }

DEFINE_ROTATE(rotate_float, float, load_float, store_float)
DEFINE_ROTATE(rotate_bf16, bf16, load_bf16, store_bf16)

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
