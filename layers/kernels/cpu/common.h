/* Shared by the CPU kernels: number formats, vectors, a vectorisable exponential, export macro. */
#ifndef LOCKSTEP_COMMON_H
#define LOCKSTEP_COMMON_H

#include <math.h>
#include <omp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512BF16__)
#include <immintrin.h>
#define HAVE_BF16_DOT 1
#else
#define HAVE_BF16_DOT 0
#endif

#define EXPORT __attribute__((visibility("default")))
#define ALIGNED __attribute__((aligned(64)))

/* Element types as the Python side names them. */
enum { DTYPE_FLOAT32 = 0, DTYPE_BFLOAT16 = 1 };

typedef uint16_t bf16;

static inline float bf16_to_float(bf16 x) {
    union { uint32_t bits; float value; } u = {(uint32_t)x << 16};
    return u.value;
}

/* Round to nearest even; NaN stays NaN. */
static inline bf16 float_to_bf16(float x) {
    union { float value; uint32_t bits; } u = {x};
    uint32_t rounded = (u.bits + 0x7fffu + ((u.bits >> 16) & 1u)) >> 16;
    return (bf16)(((u.bits & 0x7fffffffu) > 0x7f800000u) ? 0x7fc0u : rounded);
}

static inline float load_float(const float *p) { return *p; }
static inline float load_bf16(const bf16 *p) { return bf16_to_float(*p); }
static inline void store_float(float *p, float x) { *p = x; }
static inline void store_bf16(bf16 *p, float x) { *p = float_to_bf16(x); }

/* exp(x) within 2 units in the last place, as straight-line code that compilers vectorise. Below -87 the result is 0
 * (the true value would be a denormal), so that exp(-inf) is 0; above 88 it is clamped; NaN stays NaN.
 * 2^f on [-0.5, 0.5] is the Taylor polynomial of degree 7, whose error there is below 6e-9. */
static inline float fast_exp(float x) {
    float y = x > 88.0f ? 88.0f : x;
    float t = y < -87.0f ? -87.0f : y;
    float scaled = t * 1.44269504088896341f;
    float n = __builtin_nearbyintf(scaled);
    /* Two-part ln 2, so that the reduced argument keeps its low bits. */
    float r = t - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    float p = 1.9841270e-4f;
    p = p * r + 1.3888889e-3f;
    p = p * r + 8.3333333e-3f;
    p = p * r + 4.1666667e-2f;
    p = p * r + 1.6666667e-1f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    union { int32_t bits; float value; } scale = {((int32_t)n + 127) << 23};
    float result = p * scale.value;
    result = y < -87.0f ? 0.0f : result;
    return x != x ? x : result;
}

#define LANES 16

typedef float vec __attribute__((vector_size(64)));
typedef float unaligned_vec __attribute__((vector_size(64), aligned(4)));
typedef int32_t int_vec __attribute__((vector_size(64)));
typedef uint32_t uint_vec __attribute__((vector_size(64)));
typedef bf16 bf16_vec __attribute__((vector_size(32), aligned(2)));

static const int_vec lane_numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* Lanes of `a` where the comparison held (all bits set), of `b` elsewhere. */
static inline vec choose(int_vec held, vec a, vec b) { return (vec)((held & (int_vec)a) | (~held & (int_vec)b)); }

/* `fast_exp` of 16 lanes. */
static inline vec exp_lanes(vec x) {
    vec result;
    for (int i = 0; i < LANES; i++) result[i] = fast_exp(x[i]);
    return result;
}

/* The functions above for 16 numbers side by side. */
static inline vec load_float_lanes(const float *p) { return *(const unaligned_vec *)p; }
static inline void store_float_lanes(float *p, vec x) { *(unaligned_vec *)p = x; }

static inline vec load_bf16_lanes(const bf16 *p) {
#if HAVE_BF16_DOT
    uint_vec bits = (uint_vec)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
#else
    uint_vec bits = __builtin_convertvector(*(const bf16_vec *)p, uint_vec);
#endif
    return (vec)(bits << 16);
}

/* The instruction gives 0 for results below 2^-126, else the same numbers. */
static inline bf16_vec lanes_to_bf16(vec x) {
#if HAVE_BF16_DOT
    return (bf16_vec)_mm512_cvtneps_pbh((__m512)x);
#else
    uint_vec bits = (uint_vec)x;
    uint_vec rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    vec result = choose(x != x, (vec)((uint_vec){0} + 0x7fc0u), (vec)rounded);
    return __builtin_convertvector((uint_vec)result, bf16_vec);
#endif
}

static inline void store_bf16_lanes(bf16 *p, vec x) { *(bf16_vec *)p = lanes_to_bf16(x); }

static inline float silu(float x) { return x / (1.0f + fast_exp(-x)); }
static inline vec silu_lanes(vec x) { return x / (1.0f + exp_lanes(-x)); }

static inline float round_float(float x) { return x; }
static inline float round_bf16(float x) { return bf16_to_float(float_to_bf16(x)); }
static inline vec round_float_lanes(vec x) { return x; }
static inline vec round_bf16_lanes(vec x) {
    bf16_vec rounded = lanes_to_bf16(x);
    return load_bf16_lanes((const bf16 *)&rounded);
}

/* The half-open share [begin, end) of thread `rank` when `total` units are spread over `size` threads. */
static inline void share(int64_t total, int rank, int size, int64_t *begin, int64_t *end) {
    *begin = total * rank / size;
    *end = total * (rank + 1) / size;
}

#endif
