/* SPDX-License-Identifier: Apache-2.0
 * One element at a time between float and the 16-bit types, in plain C: for the ref tier and for gates. */
#ifndef GDN_CONVERT_H
#define GDN_CONVERT_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernels/kernels.h"

static inline float gdn_bits_f32(uint32_t u) {
  float x;
  memcpy(&x, &u, sizeof(x));
  return x;
}

static inline uint32_t gdn_f32_bits(float x) {
  uint32_t u;
  memcpy(&u, &x, sizeof(u));
  return u;
}

static inline float gdn_from_bf16(uint16_t h) {
  return gdn_bits_f32((uint32_t)h << 16);
}

/* Nearest, ties to even; NaN becomes quiet. */
static inline uint16_t gdn_to_bf16(float x) {
  const uint32_t u = gdn_f32_bits(x);
  if (isnan(x)) return (uint16_t)((u | 0x400000u) >> 16);
  return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

static inline float gdn_from_f16(uint16_t h) {
  const uint32_t sign = (h & 0x8000u) << 16, exponent = h >> 10 & 31u, mantissa = h & 0x3ffu;
  if (exponent == 31) return gdn_bits_f32(sign | 0x7f800000u | mantissa << 13 | (mantissa ? 0x400000u : 0));
  if (exponent == 0) return (sign ? -0x1p-24f : 0x1p-24f) * (float)mantissa;
  return gdn_bits_f32(sign | (exponent + 112) << 23 | mantissa << 13);
}

/* Nearest, ties to even; infinite from 65520 on; NaN becomes quiet. */
static inline uint16_t gdn_to_f16(float x) {
  const uint32_t bits = gdn_f32_bits(x), sign = bits >> 16 & 0x8000u, u = bits & 0x7fffffffu;
  if (u > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | (u >> 13 & 0x3ffu));
  if (u >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);
  /* Below the smallest normal number the unit of f16, 2^-24, is that of a float in 0.5 .. 1. */
  if (u < 0x38800000u) return (uint16_t)(sign | (gdn_f32_bits(gdn_bits_f32(u) + 0.5f) - 0x3f000000u));
  return (uint16_t)(sign | (u - 0x38000000u + 0xfffu + (u >> 13 & 1u)) >> 13);
}

/* Element i of an array of any dtype. */
static inline float gdn_load_elem(const void *data, int64_t i, int32_t dtype) {
  if (dtype == GDN_ROWS_BF16) return gdn_from_bf16(((const uint16_t *)data)[i]);
  if (dtype == GDN_ROWS_F16) return gdn_from_f16(((const uint16_t *)data)[i]);
  return ((const float *)data)[i];
}

static inline void gdn_store_elem(void *data, int64_t i, int32_t dtype, float x) {
  if (dtype == GDN_ROWS_BF16)
    ((uint16_t *)data)[i] = gdn_to_bf16(x);
  else if (dtype == GDN_ROWS_F16)
    ((uint16_t *)data)[i] = gdn_to_f16(x);
  else
    ((float *)data)[i] = x;
}

#endif
