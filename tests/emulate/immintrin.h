/* SPDX-License-Identifier: Apache-2.0
 * The vector and tile operations that the kernels use, in C for any x86-64: found before the compiler's own header, so
 * that kernel sources build and run unchanged where the processor has none of it. Results are those of the manual, to
 * the bit but for what is said at _mm512_dpbf16_ps. What a processor would fault on, or a caller forgets, aborts with a
 * message; see state.c. A kernel that needs a further operation: one more function in its section here. */
#ifndef GDN_TESTS_EMULATE_IMMINTRIN_H
#define GDN_TESTS_EMULATE_IMMINTRIN_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define EMU static inline __attribute__((always_inline, unused))
/* Loops over lanes are calls: inlined into unrolled kernels, they would take minutes to compile. */
#define EMU_CALL static __attribute__((noinline, unused))

typedef float __m128 __attribute__((vector_size(16), may_alias));
typedef float __m256 __attribute__((vector_size(32), may_alias));
typedef float __m512 __attribute__((vector_size(64), may_alias));
typedef long long __m128i __attribute__((vector_size(16), may_alias));
typedef long long __m256i __attribute__((vector_size(32), may_alias));
typedef long long __m512i __attribute__((vector_size(64), may_alias));
typedef short __m512bh __attribute__((vector_size(64), may_alias));
typedef uint8_t __mmask8;
typedef uint16_t __mmask16;
typedef uint32_t __mmask32;

typedef int32_t emu_i4 __attribute__((vector_size(16), may_alias));
typedef int32_t emu_i8 __attribute__((vector_size(32), may_alias));
typedef int32_t emu_i16 __attribute__((vector_size(64), may_alias));
typedef uint32_t emu_u8 __attribute__((vector_size(32), may_alias));
typedef uint32_t emu_u16 __attribute__((vector_size(64), may_alias));
typedef uint16_t emu_h8 __attribute__((vector_size(16), may_alias));
typedef uint16_t emu_h16 __attribute__((vector_size(32), may_alias));
typedef uint16_t emu_h32 __attribute__((vector_size(64), may_alias));

/* ---- state.c ---- */

void emu_fail(const char *operation, const char *what) __attribute__((noreturn));
/* Output past the caches is owed a fence before the thread's work is seen to be over. */
void emu_streamed(void);
void emu_fence(void);
void emu_tile_loadconfig(const void *config);
void emu_tile_release(void);
void emu_tile_zero(int tile);
void emu_tile_load(int tile, const void *base, int64_t stride);
void emu_tile_store(int tile, void *base, int64_t stride);
void emu_tile_dpbf16ps(int sum, int a, int b);

EMU void emu_aligned(const void *p, const char *operation) {
  if ((uintptr_t)p % 64) emu_fail(operation, "an address that is no multiple of 64");
}

/* ---- one lane ---- */

EMU uint32_t emu_bits(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}

EMU float emu_float(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}

/* a b + c rounded once: the product of two floats is exact in double, and a sum that is rounded to odd there rounds to
 * float as if it were exact. */
EMU float emu_fma1(float a, float b, float c) {
  const double p = (double)a * (double)b, s = p + (double)c, from_c = s - p;
  const double lost = (p - (s - from_c)) + ((double)c - from_c);
  int64_t u;
  memcpy(&u, &s, 8);
  const int64_t inexact = (lost > 0) | (lost < 0), outwards = 2 * ((lost > 0) == (s > 0)) - 1;
  u += outwards & -(inexact & ~u & 1);
  double odd;
  memcpy(&odd, &u, 8);
  return (float)odd;
}

/* The second operand when one is NaN, or both are zero. */
EMU float emu_min1(float a, float b) {
  return a < b ? a : b;
}

EMU float emu_max1(float a, float b) {
  return a > b ? a : b;
}

EMU float emu_round1(float x) {
  const float size = fabsf(x);
  return size < 0x1p23f ? copysignf((size + 0x1p23f) - 0x1p23f, x) : x;
}

/* x 2^floor(y): in three factors, of which only the last rounds. */
EMU float emu_scale1(float x, float y) {
  if (isnan(y)) return y;
  if (isinf(y)) return isnan(x) ? (y > 0 ? y : 0) : x * (y > 0 ? y : 0);
  const int n = (int)floorf(y < -400 ? -400 : y > 400 ? 400 : y), a = n / 4, b = n - 3 * a;
  const double third = (double)emu_float((uint32_t)(a + 127) << 23);
  const double last = (double)emu_float((uint32_t)(b + 127) << 23);
  return (float)((double)x * third * third * third * last);
}

EMU float emu_from_f16(uint16_t h) {
  const uint32_t sign = (uint32_t)(h >> 15) << 31, exponent = h >> 10 & 31, fraction = h & 1023;
  if (exponent == 31) return emu_float(sign | 0x7f800000 | fraction << 13 | (fraction ? 0x400000 : 0));
  const float size = exponent ? emu_float((exponent + 112) << 23 | fraction << 13) : (float)fraction * 0x1p-24f;
  return sign ? -size : size;
}

EMU uint16_t emu_to_f16(float x) {
  const uint32_t u = emu_bits(x);
  const uint16_t sign = (uint16_t)(u >> 16 & 0x8000);
  const float size = fabsf(x);
  if (isnan(x)) return (uint16_t)(sign | 0x7e00 | (u >> 13 & 0x3ff));
  if (size >= 65520) return sign | 0x7c00;
  /* Adding 2^23 units of the last place that f16 has here leaves the rounded number of units. */
  int exponent = (int)(emu_bits(size) >> 23) - 127;
  if (exponent < -14) exponent = -14;
  const float units = size * emu_float((uint32_t)(10 - exponent + 127) << 23);
  return (uint16_t)(sign | (uint32_t)((exponent + 14) * 1024 + (int)((units + 0x1p23f) - 0x1p23f)));
}

/* Denormal numbers as zeros of their sign. */
EMU uint32_t emu_flush1(uint32_t u) {
  return u & 0x7f800000 ? u : u & 0x80000000;
}

/* To bfloat16 as VCVTNE2PS2BF16 does: nearest even, denormal numbers are zeros, NaN becomes quiet. */
EMU uint16_t emu_to_bf16(float x) {
  const uint32_t u = emu_flush1(emu_bits(x));
  if (isnan(x)) return (uint16_t)(u >> 16 | 0x40);
  return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

/* ---- the same for vectors of 8 and 16 floats ---- */

#define _CMP_UNORD_Q 0x03
#define _CMP_NLT_UQ 0x05
#define _CMP_ORD_Q 0x07
#define _CMP_LT_OQ 0x11
#define _MM_FROUND_TO_NEAREST_INT 0
#define _MM_FROUND_NO_EXC 8
#define _MM_HINT_T0 3
#define _MM_HINT_T1 2
#define _MM_HINT_T2 1

#define EMU_MAP1(name, V, N, fn)                                                                                       \
  EMU_CALL V name(V a) {                                                                                               \
    for (int i = 0; i < N; i++) a[i] = fn(a[i]);                                                                       \
    return a;                                                                                                          \
  }
#define EMU_MAP2(name, V, N, fn)                                                                                       \
  EMU_CALL V name(V a, V b) {                                                                                          \
    for (int i = 0; i < N; i++) a[i] = fn(a[i], b[i]);                                                                 \
    return a;                                                                                                          \
  }

/* P: prefix of the names; V, VI: vectors of floats and of integers; I, U: of N integers. */
#define EMU_VECTORS(P, S, V, VI, I, U, N)                                                                              \
  EMU V P##_set1_ps(float x) {                                                                                         \
    return x - (V){0};                                                                                                 \
  }                                                                                                                    \
  EMU VI P##_set1_epi32(int x) {                                                                                       \
    return (VI)(x - (I){0});                                                                                           \
  }                                                                                                                    \
  EMU V P##_setzero_ps(void) {                                                                                         \
    return (V){0};                                                                                                     \
  }                                                                                                                    \
  EMU V P##_loadu_ps(const void *p) {                                                                                  \
    V x;                                                                                                               \
    memcpy(&x, p, sizeof x);                                                                                           \
    return x;                                                                                                          \
  }                                                                                                                    \
  EMU VI P##_loadu_##S(const void *p) {                                                                                \
    VI x;                                                                                                              \
    memcpy(&x, p, sizeof x);                                                                                           \
    return x;                                                                                                          \
  }                                                                                                                    \
  EMU void P##_storeu_ps(void *p, V x) {                                                                               \
    memcpy(p, &x, sizeof x);                                                                                           \
  }                                                                                                                    \
  EMU void P##_storeu_##S(void *p, VI x) {                                                                             \
    memcpy(p, &x, sizeof x);                                                                                           \
  }                                                                                                                    \
  EMU V P##_add_ps(V a, V b) {                                                                                         \
    return a + b;                                                                                                      \
  }                                                                                                                    \
  EMU V P##_sub_ps(V a, V b) {                                                                                         \
    return a - b;                                                                                                      \
  }                                                                                                                    \
  EMU V P##_mul_ps(V a, V b) {                                                                                         \
    return a * b;                                                                                                      \
  }                                                                                                                    \
  EMU V P##_div_ps(V a, V b) {                                                                                         \
    return a / b;                                                                                                      \
  }                                                                                                                    \
  EMU_MAP2(P##_min_ps, V, N, emu_min1)                                                                                 \
  EMU_MAP2(P##_max_ps, V, N, emu_max1)                                                                                 \
  EMU_MAP1(P##_sqrt_ps, V, N, sqrtf)                                                                                   \
  EMU_CALL V P##_fmadd_ps(V a, V b, V c) {                                                                             \
    for (int i = 0; i < N; i++) c[i] = emu_fma1(a[i], b[i], c[i]);                                                     \
    return c;                                                                                                          \
  }                                                                                                                    \
  EMU V P##_fnmadd_ps(V a, V b, V c) {                                                                                 \
    return P##_fmadd_ps(-a, b, c);                                                                                     \
  }                                                                                                                    \
  EMU V P##_and_ps(V a, V b) {                                                                                         \
    return (V)((VI)a & (VI)b);                                                                                         \
  }                                                                                                                    \
  EMU V P##_andnot_ps(V a, V b) {                                                                                      \
    return (V)(~(VI)a & (VI)b);                                                                                        \
  }                                                                                                                    \
  EMU VI P##_and_##S(VI a, VI b) {                                                                                     \
    return a & b;                                                                                                      \
  }                                                                                                                    \
  EMU VI P##_or_##S(VI a, VI b) {                                                                                      \
    return a | b;                                                                                                      \
  }                                                                                                                    \
  EMU V P##_cast##S##_ps(VI x) {                                                                                       \
    return (V)x;                                                                                                       \
  }                                                                                                                    \
  EMU VI P##_castps_##S(V x) {                                                                                         \
    return (VI)x;                                                                                                      \
  }                                                                                                                    \
  EMU VI P##_add_epi32(VI a, VI b) {                                                                                   \
    return (VI)((U)a + (U)b);                                                                                          \
  }                                                                                                                    \
  EMU VI P##_sub_epi32(VI a, VI b) {                                                                                   \
    return (VI)((U)a - (U)b);                                                                                          \
  }                                                                                                                    \
  EMU VI P##_slli_epi32(VI a, int n) {                                                                                 \
    return (VI)((U)a << n);                                                                                            \
  }                                                                                                                    \
  EMU VI P##_srli_epi32(VI a, int n) {                                                                                 \
    return (VI)((U)a >> n);                                                                                            \
  }                                                                                                                    \
  EMU VI P##_srai_epi32(VI a, int n) {                                                                                 \
    return (VI)((I)a >> n);                                                                                            \
  }                                                                                                                    \
  EMU V P##_cvtepi32_ps(VI a) {                                                                                        \
    return __builtin_convertvector((I)a, V);                                                                           \
  }                                                                                                                    \
  EMU I emu_compare_##N(V a, V b, int predicate) {                                                                     \
    if (predicate == _CMP_LT_OQ) return (I)(a < b);                                                                    \
    if (predicate == _CMP_NLT_UQ) return ~(I)(a < b);                                                                  \
    if (predicate == _CMP_UNORD_Q) return ~((I)(a == a) & (I)(b == b));                                                \
    if (predicate == _CMP_ORD_Q) return (I)(a == a) & (I)(b == b);                                                     \
    emu_fail(#P "_cmp_ps", "a predicate that is not emulated");                                                        \
  }                                                                                                                    \
  /* -1 where the mask has a bit. */                                                                                   \
  EMU_CALL I emu_lanes_##N(uint32_t mask) {                                                                            \
    I x = {0};                                                                                                         \
    for (int i = 0; i < N; i++) x[i] = -(int)(mask >> i & 1);                                                          \
    return x;                                                                                                          \
  }                                                                                                                    \
  EMU V emu_pick_##N(I lanes, V yes, V no) {                                                                           \
    return (V)((lanes & (I)yes) | (~lanes & (I)no));                                                                   \
  }

EMU_VECTORS(_mm256, si256, __m256, __m256i, emu_i8, emu_u8, 8)
EMU_VECTORS(_mm512, si512, __m512, __m512i, emu_i16, emu_u16, 16)

EMU void emu_rounding(int mode) {
  if (mode != (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)) emu_fail("rounding", "a mode that is not emulated");
}

/* ---- 128 bits ---- */

#define _mm_prefetch(p, hint) ((void)(p), (void)(hint))

EMU void _mm_sfence(void) {
  emu_fence();
}

EMU __m128 _mm_loadu_ps(const void *p) {
  __m128 x;
  memcpy(&x, p, sizeof x);
  return x;
}

EMU __m128i _mm_loadu_si128(const void *p) {
  __m128i x;
  memcpy(&x, p, sizeof x);
  return x;
}

EMU void _mm_storeu_si128(void *p, __m128i x) {
  memcpy(p, &x, sizeof x);
}

EMU __m128 _mm_set1_ps(float x) {
  return x - (__m128){0};
}

EMU __m128 _mm_add_ps(__m128 a, __m128 b) {
  return a + b;
}

EMU __m128 _mm_add_ss(__m128 a, __m128 b) {
  a[0] += b[0];
  return a;
}

EMU __m128 _mm_movehl_ps(__m128 a, __m128 b) {
  return (__m128){b[2], b[3], a[2], a[3]};
}

EMU __m128 _mm_movehdup_ps(__m128 a) {
  return (__m128){a[1], a[1], a[3], a[3]};
}

EMU float _mm_cvtss_f32(__m128 a) {
  return a[0];
}

/* Signed to unsigned, with saturation. */
EMU uint16_t emu_packus1(int x) {
  return (uint16_t)(x < 0 ? 0 : x > 0xffff ? 0xffff : x);
}

EMU_CALL __m128i _mm_packus_epi32(__m128i a, __m128i b) {
  emu_h8 r;
  for (int i = 0; i < 4; i++) {
    r[i] = emu_packus1(((emu_i4)a)[i]);
    r[4 + i] = emu_packus1(((emu_i4)b)[i]);
  }
  return (__m128i)r;
}

/* ---- 256 bits ---- */

#define EMU_HALF(name, V, H, N)                                                                                        \
  EMU H name(V x, int half) {                                                                                          \
    H r;                                                                                                               \
    memcpy(&r, (const char *)&x + (half & (int)(sizeof x / sizeof r - 1)) * (int)sizeof r, sizeof r);                  \
    return r;                                                                                                          \
  }
#define EMU_INSERT(name, V, H)                                                                                         \
  EMU V name(V x, H part, int half) {                                                                                  \
    memcpy((char *)&x + (half & (int)(sizeof x / sizeof part - 1)) * (int)sizeof part, &part, sizeof part);            \
    return x;                                                                                                          \
  }
/* The upper lanes of a cast are not defined: here they are NaN, so that a use shows. */
#define EMU_WIDEN(name, V, H)                                                                                          \
  EMU V name(H part) {                                                                                                 \
    V x;                                                                                                               \
    memset(&x, 0xff, sizeof x);                                                                                        \
    memcpy(&x, &part, sizeof part);                                                                                    \
    return x;                                                                                                          \
  }

EMU_HALF(_mm256_extractf128_ps, __m256, __m128, 2)
EMU_HALF(_mm256_extracti128_si256, __m256i, __m128i, 2)
EMU_INSERT(_mm256_insertf128_ps, __m256, __m128)
EMU_INSERT(_mm256_inserti128_si256, __m256i, __m128i)
EMU_WIDEN(_mm256_castps128_ps256, __m256, __m128)
EMU_WIDEN(_mm256_castsi128_si256, __m256i, __m128i)

EMU __m128 _mm256_castps256_ps128(__m256 x) {
  return _mm256_extractf128_ps(x, 0);
}

EMU __m128i _mm256_castsi256_si128(__m256i x) {
  return _mm256_extracti128_si256(x, 0);
}

EMU_CALL void _mm256_stream_ps(void *p, __m256 x) {
  if ((uintptr_t)p % 32) emu_fail("_mm256_stream_ps", "an address that is no multiple of 32");
  emu_streamed();
  _mm256_storeu_ps(p, x);
}

EMU __m256i _mm256_setr_epi32(int a, int b, int c, int d, int e, int f, int g, int h) {
  return (__m256i)(emu_i8){a, b, c, d, e, f, g, h};
}

EMU __m256i _mm256_set1_epi8(char x) {
  __m256i r;
  memset(&r, x, sizeof r);
  return r;
}

EMU __m256i _mm256_cmpgt_epi32(__m256i a, __m256i b) {
  return (__m256i)((emu_i8)a > (emu_i8)b);
}

EMU __m256i _mm256_cmpeq_epi32(__m256i a, __m256i b) {
  return (__m256i)((emu_i8)a == (emu_i8)b);
}

EMU __m256 _mm256_cmp_ps(__m256 a, __m256 b, int predicate) {
  return (__m256)emu_compare_8(a, b, predicate);
}

EMU_CALL int _mm256_movemask_ps(__m256 a) {
  int mask = 0;
  for (int i = 0; i < 8; i++) mask |= (((emu_i8)a)[i] < 0) << i;
  return mask;
}

/* The same 8 choices in each half. */
EMU_CALL __m256i _mm256_blend_epi16(__m256i no, __m256i yes, int mask) {
  emu_h16 r;
  for (int i = 0; i < 16; i++) r[i] = mask >> i % 8 & 1 ? ((emu_h16)yes)[i] : ((emu_h16)no)[i];
  return (__m256i)r;
}

EMU __m256 _mm256_blendv_ps(__m256 no, __m256 yes, __m256 sign) {
  return emu_pick_8((emu_i8)sign >> 31, yes, no);
}

EMU __m256 _mm256_maskz_mov_ps(__mmask8 mask, __m256 a) {
  return emu_pick_8(emu_lanes_8(mask), a, (__m256){0});
}

EMU_CALL __m256 _mm256_maskload_ps(const float *p, __m256i mask) {
  __m256 r = {0};
  for (int i = 0; i < 8; i++)
    if (((emu_i8)mask)[i] < 0) r[i] = p[i];
  return r;
}

EMU_CALL void _mm256_maskstore_ps(float *p, __m256i mask, __m256 x) {
  for (int i = 0; i < 8; i++)
    if (((emu_i8)mask)[i] < 0) p[i] = x[i];
}

EMU_CALL __m256i _mm256_maskz_loadu_epi16(__mmask16 mask, const void *p) {
  emu_h16 r = {0};
  for (int i = 0; i < 16; i++)
    if (mask >> i & 1) memcpy((char *)&r + 2 * i, (const char *)p + 2 * i, 2);
  return (__m256i)r;
}

EMU_CALL __m256 _mm256_permutevar8x32_ps(__m256 a, __m256i order) {
  __m256 r;
  for (int i = 0; i < 8; i++) r[i] = a[((emu_i8)order)[i] & 7];
  return r;
}

EMU_CALL __m256 _mm256_round_ps(__m256 a, int mode) {
  emu_rounding(mode);
  for (int i = 0; i < 8; i++) a[i] = emu_round1(a[i]);
  return a;
}

EMU_CALL __m256i _mm256_cvtps_epi32(__m256 a) {
  emu_i8 r;
  for (int i = 0; i < 8; i++) r[i] = a[i] >= -0x1p31f && a[i] < 0x1p31f ? (int)emu_round1(a[i]) : INT32_MIN;
  return (__m256i)r;
}

EMU __m256i _mm256_cvtepu16_epi32(__m128i a) {
  return (__m256i) __builtin_convertvector((emu_h8)a, emu_u8);
}

EMU_CALL __m256 _mm256_cvtph_ps(__m128i a) {
  __m256 r;
  for (int i = 0; i < 8; i++) r[i] = emu_from_f16(((emu_h8)a)[i]);
  return r;
}

EMU_CALL __m128i _mm256_cvtps_ph(__m256 a, int mode) {
  emu_h8 r;
  emu_rounding(mode);
  for (int i = 0; i < 8; i++) r[i] = emu_to_f16(a[i]);
  return (__m128i)r;
}

EMU_CALL __m256i _mm256_packus_epi32(__m256i a, __m256i b) {
  emu_h16 r;
  for (int i = 0; i < 16; i++) r[i] = emu_packus1(((emu_i8)(i & 4 ? b : a))[i / 8 * 4 + i % 4]);
  return (__m256i)r;
}

EMU __m256i _mm256_permute4x64_epi64(__m256i a, int order) {
  return (__m256i){a[order & 3], a[order >> 2 & 3], a[order >> 4 & 3], a[order >> 6 & 3]};
}

/* Either half of either operand; zero where bit 3 says so. */
EMU __m128 emu_half_of(__m256 a, __m256 b, int pick) {
  if (pick & 8) return (__m128){0};
  return _mm256_extractf128_ps(pick & 2 ? b : a, pick & 1);
}

EMU __m256 _mm256_permute2f128_ps(__m256 a, __m256 b, int picks) {
  const __m128 high = emu_half_of(a, b, picks >> 4);
  return _mm256_insertf128_ps(_mm256_castps128_ps256(emu_half_of(a, b, picks)), high, 1);
}

/* Within each 128-bit lane two floats of a and two of b. */
#define EMU_SHUFFLES(P, V, N)                                                                                          \
  EMU_CALL V P##_unpacklo_ps(V a, V b) {                                                                               \
    V r;                                                                                                               \
    for (int i = 0; i < N; i++) r[i] = i & 1 ? b[i / 4 * 4 + i % 4 / 2] : a[i / 4 * 4 + i % 4 / 2];                    \
    return r;                                                                                                          \
  }                                                                                                                    \
  EMU_CALL V P##_unpackhi_ps(V a, V b) {                                                                               \
    V r;                                                                                                               \
    for (int i = 0; i < N; i++) r[i] = i & 1 ? b[i / 4 * 4 + 2 + i % 4 / 2] : a[i / 4 * 4 + 2 + i % 4 / 2];            \
    return r;                                                                                                          \
  }                                                                                                                    \
  EMU_CALL V P##_shuffle_ps(V a, V b, int picks) {                                                                     \
    V r;                                                                                                               \
    for (int i = 0; i < N; i++) r[i] = (i & 2 ? b : a)[i / 4 * 4 + (picks >> 2 * (i % 4) & 3)];                        \
    return r;                                                                                                          \
  }

EMU_SHUFFLES(_mm256, __m256, 8)
EMU_SHUFFLES(_mm512, __m512, 16)

/* ---- 512 bits ---- */

EMU_HALF(_mm512_extractf32x8_ps, __m512, __m256, 2)
EMU_HALF(_mm512_extractf32x4_ps, __m512, __m128, 4)
EMU_INSERT(_mm512_insertf32x8, __m512, __m256)
EMU_WIDEN(_mm512_castps256_ps512, __m512, __m256)
EMU_WIDEN(_mm512_castps128_ps512, __m512, __m128)
EMU_HALF(_mm512_extracti64x4_epi64, __m512i, __m256i, 2)
EMU_INSERT(_mm512_inserti64x4, __m512i, __m256i)
EMU_WIDEN(_mm512_castsi256_si512, __m512i, __m256i)

EMU __m256i _mm512_castsi512_si256(__m512i x) {
  return _mm512_extracti64x4_epi64(x, 0);
}

EMU __m256 _mm512_castps512_ps256(__m512 x) {
  return _mm512_extractf32x8_ps(x, 0);
}

EMU __m512 _mm512_zextps256_ps512(__m256 x) {
  return _mm512_insertf32x8((__m512){0}, x, 0);
}

EMU __m512 _mm512_broadcast_f32x8(__m256 x) {
  return _mm512_insertf32x8(_mm512_castps256_ps512(x), x, 1);
}

EMU __m512i _mm512_setzero_si512(void) {
  return (__m512i){0};
}

EMU __m512i _mm512_set_epi32(int a, int b, int c, int d, int e, int f, int g, int h, int i, int j, int k, int l, int m,
                             int n, int o, int p) {
  return (__m512i)(emu_i16){p, o, n, m, l, k, j, i, h, g, f, e, d, c, b, a};
}

/* 32 arguments, last lane first. */
#define _mm512_set_epi16(...) emu_reverse_16((const short[32]){__VA_ARGS__})

EMU_CALL __m512i emu_reverse_16(const short x[32]) {
  emu_h32 r;
  for (int i = 0; i < 32; i++) r[i] = (uint16_t)x[31 - i];
  return (__m512i)r;
}

EMU_CALL __m512 _mm512_load_ps(const void *p) {
  emu_aligned(p, "_mm512_load_ps");
  return _mm512_loadu_ps(p);
}

EMU_CALL __m512i _mm512_load_si512(const void *p) {
  emu_aligned(p, "_mm512_load_si512");
  return _mm512_loadu_si512(p);
}

EMU_CALL void _mm512_store_ps(void *p, __m512 x) {
  emu_aligned(p, "_mm512_store_ps");
  _mm512_storeu_ps(p, x);
}

EMU_CALL void _mm512_store_si512(void *p, __m512i x) {
  emu_aligned(p, "_mm512_store_si512");
  _mm512_storeu_si512(p, x);
}

EMU_CALL void _mm512_stream_si512(void *p, __m512i x) {
  emu_aligned(p, "_mm512_stream_si512");
  emu_streamed();
  _mm512_storeu_si512(p, x);
}

EMU_CALL void _mm512_stream_ps(void *p, __m512 x) {
  emu_aligned(p, "_mm512_stream_ps");
  emu_streamed();
  _mm512_storeu_ps(p, x);
}

/* Memory of lanes without a bit is not touched. */
EMU_CALL __m512 _mm512_maskz_loadu_ps(__mmask16 mask, const void *p) {
  __m512 r = {0};
  for (int i = 0; i < 16; i++)
    if (mask >> i & 1) memcpy((char *)&r + 4 * i, (const char *)p + 4 * i, 4);
  return r;
}

EMU_CALL void _mm512_mask_storeu_ps(void *p, __mmask16 mask, __m512 x) {
  for (int i = 0; i < 16; i++)
    if (mask >> i & 1) memcpy((char *)p + 4 * i, (const char *)&x + 4 * i, 4);
}

EMU_CALL __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int predicate) {
  const emu_i16 lanes = emu_compare_16(a, b, predicate);
  uint32_t mask = 0;
  for (int i = 0; i < 16; i++) mask |= (uint32_t)(lanes[i] & 1) << i;
  return (__mmask16)mask;
}

EMU_CALL __m512 _mm512_mask_mov_ps(__m512 no, __mmask16 mask, __m512 yes) {
  return emu_pick_16(emu_lanes_16(mask), yes, no);
}

EMU __m512 _mm512_mask_blend_ps(__mmask16 mask, __m512 no, __m512 yes) {
  return emu_pick_16(emu_lanes_16(mask), yes, no);
}

EMU_CALL __m512 _mm512_maskz_mov_ps(__mmask16 mask, __m512 a) {
  return emu_pick_16(emu_lanes_16(mask), a, (__m512){0});
}

EMU_CALL __m512 _mm512_maskz_mul_ps(__mmask16 mask, __m512 a, __m512 b) {
  return _mm512_maskz_mov_ps(mask, a * b);
}

EMU __m512 _mm512_maskz_fmadd_ps(__mmask16 mask, __m512 a, __m512 b, __m512 c) {
  return _mm512_maskz_mov_ps(mask, _mm512_fmadd_ps(a, b, c));
}

EMU __m512 _mm512_maskz_fnmadd_ps(__mmask16 mask, __m512 a, __m512 b, __m512 c) {
  return _mm512_maskz_mov_ps(mask, _mm512_fnmadd_ps(a, b, c));
}

EMU __mmask16 _mm512_test_epi32_mask(__m512i a, __m512i b) {
  const emu_i16 both = (emu_i16)(a & b);
  uint32_t mask = 0;
  for (int i = 0; i < 16; i++) mask |= (uint32_t)(both[i] != 0) << i;
  return (__mmask16)mask;
}

EMU __m512i _mm512_mask_add_epi32(__m512i no, __mmask16 mask, __m512i a, __m512i b) {
  return (__m512i)emu_pick_16(emu_lanes_16(mask), (__m512)((emu_u16)a + (emu_u16)b), (__m512)no);
}

EMU __m512i _mm512_mask_or_epi32(__m512i no, __mmask16 mask, __m512i a, __m512i b) {
  return (__m512i)emu_pick_16(emu_lanes_16(mask), (__m512)(a | b), (__m512)no);
}

EMU_CALL __m512i _mm512_mask_blend_epi16(__mmask32 mask, __m512i no, __m512i yes) {
  emu_h32 r;
  for (int i = 0; i < 32; i++) r[i] = mask >> i & 1 ? ((emu_h32)yes)[i] : ((emu_h32)no)[i];
  return (__m512i)r;
}

EMU_CALL __m512 _mm512_mask_broadcast_f32x4(__m512 no, __mmask16 mask, __m128 a) {
  for (int i = 0; i < 16; i++)
    if (mask >> i & 1) no[i] = a[i % 4];
  return no;
}

EMU_CALL __m512 _mm512_roundscale_ps(__m512 a, int mode) {
  emu_rounding(mode);
  for (int i = 0; i < 16; i++) a[i] = emu_round1(a[i]);
  return a;
}

EMU_CALL __m512 _mm512_maskz_scalef_ps(__mmask16 mask, __m512 a, __m512 b) {
  for (int i = 0; i < 16; i++) a[i] = emu_scale1(a[i], b[i]);
  return _mm512_maskz_mov_ps(mask, a);
}

EMU __m512i _mm512_cvtepu16_epi32(__m256i a) {
  return (__m512i) __builtin_convertvector((emu_h16)a, emu_u16);
}

EMU __m256i _mm512_cvtepi32_epi16(__m512i a) {
  return (__m256i) __builtin_convertvector((emu_u16)a, emu_h16);
}

EMU_CALL __m512 _mm512_cvtph_ps(__m256i a) {
  __m512 r;
  for (int i = 0; i < 16; i++) r[i] = emu_from_f16(((emu_h16)a)[i]);
  return r;
}

EMU_CALL __m256i _mm512_cvtps_ph(__m512 a, int mode) {
  emu_h16 r;
  emu_rounding(mode);
  for (int i = 0; i < 16; i++) r[i] = emu_to_f16(a[i]);
  return (__m256i)r;
}

EMU float _mm512_cvtss_f32(__m512 a) {
  return a[0];
}

EMU_CALL __m512 _mm512_permutexvar_ps(__m512i order, __m512 a) {
  __m512 r;
  for (int i = 0; i < 16; i++) r[i] = a[((emu_i16)order)[i] & 15];
  return r;
}

EMU_CALL __m512i _mm512_maskz_permutexvar_epi16(__mmask32 mask, __m512i order, __m512i a) {
  emu_h32 r;
  for (int i = 0; i < 32; i++) r[i] = mask >> i & 1 ? ((emu_h32)a)[((emu_h32)order)[i] & 31] : 0;
  return (__m512i)r;
}

EMU_CALL __m512i _mm512_rol_epi32(__m512i a, int n) {
  return (__m512i)((emu_u16)a << (n & 31) | (emu_u16)a >> (-n & 31));
}

/* 16 of the 32 lanes of low, then high. */
EMU_CALL __m512i _mm512_alignr_epi32(__m512i high, __m512i low, int n) {
  emu_i16 r;
  const int from = n & 15;
  for (int i = 0; i < 16; i++) r[i] = i + from < 16 ? ((emu_i16)low)[i + from] : ((emu_i16)high)[i + from - 16];
  return (__m512i)r;
}

EMU_CALL __m512 _mm512_shuffle_f32x4(__m512 a, __m512 b, int picks) {
  __m512 r;
  for (int i = 0; i < 16; i++) r[i] = (i & 8 ? b : a)[4 * (picks >> 2 * (i / 4) & 3) + i % 4];
  return r;
}

/* ---- bfloat16 ---- */

EMU_CALL __m512bh _mm512_cvtne2ps_pbh(__m512 high, __m512 low) {
  emu_h32 r;
  for (int i = 0; i < 16; i++) {
    r[i] = emu_to_bf16(low[i]);
    r[16 + i] = emu_to_bf16(high[i]);
  }
  return (__m512bh)r;
}

/* Products of bfloat16 take denormal numbers, going in and coming out, as zeros, and round to nearest, whatever the
 * thread's floating-point control says: this sets it so and returns what it was. Operands that are touched after it and
 * results before it is set back are computed in between. */
EMU unsigned emu_bf16_control(void) {
  const unsigned flush = 0x8000, zeros = 0x40, masked = 0x1f80, before = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(flush | zeros | masked);
  return before;
}

#define EMU_TOUCH(x) __asm__ volatile("" : "+m"(x))

/* A product of bfloat16 is exact in float within its range, so that a multiplication and an addition are the fused
 * operation. One beyond the range, infinite or less than the smallest normal number, is so here before it is added. */
EMU_CALL __m512 _mm512_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
  const unsigned before = emu_bf16_control();
  EMU_TOUCH(sum);
  EMU_TOUCH(a);
  EMU_TOUCH(b);
  sum += (__m512)((emu_u16)a & 0xffff0000u) * (__m512)((emu_u16)b & 0xffff0000u);
  sum += (__m512)((emu_u16)a << 16) * (__m512)((emu_u16)b << 16);
  EMU_TOUCH(sum);
  __builtin_ia32_ldmxcsr(before);
  return sum;
}

/* ---- tiles ---- */

#define _tile_loadconfig(config) emu_tile_loadconfig(config)
#define _tile_release() emu_tile_release()
#define _tile_zero(tile) emu_tile_zero(tile)
#define _tile_loadd(tile, base, stride) emu_tile_load(tile, base, stride)
#define _tile_stream_loadd(tile, base, stride) emu_tile_load(tile, base, stride)
#define _tile_stored(tile, base, stride) emu_tile_store(tile, base, stride)
#define _tile_dpbf16ps(sum, a, b) emu_tile_dpbf16ps(sum, a, b)

#endif
