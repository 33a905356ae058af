/* SPDX-License-Identifier: Apache-2.0
 * Index arrays of callers: int32 or int64, read one element at a time. */
#ifndef GDN_INTS_H
#define GDN_INTS_H

#include <stdint.h>

struct gdn_ints {
  const void *data; /* null = absent */
  int wide;         /* 1: int64, 0: int32 */
};

static inline int64_t gdn_int(const struct gdn_ints *a, int64_t i) {
  return a->wide ? ((const int64_t *)a->data)[i] : ((const int32_t *)a->data)[i];
}

#endif
