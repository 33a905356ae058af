/* SPDX-License-Identifier: Apache-2.0
 * A small batch that a host program runs again and again, through the table of functions, and its results as a number:
 * every call of one kind must give the same bits, whoever calls and whatever else the process does. */
#ifndef GDN_TESTS_GUEST_H
#define GDN_TESTS_GUEST_H

#include <stdint.h>

#include "gdn.h"

enum guest_call { GUEST_RECURRENT, GUEST_CHUNK, GUEST_DECODE, GUEST_PAGED, GUEST_N_CALLS };

enum {
  GUEST_N_SEQS = 3,
  GUEST_N_TOKENS = 201,
  GUEST_DIM_K = 64,
  GUEST_DIM_V = 32,
  GUEST_N_HEADS_K = 1,
  GUEST_N_HEADS_V = 2,
  GUEST_N_PAGES = 7, /* of 64 tokens */
  GUEST_STATE_ELEMS = GUEST_N_HEADS_V * GUEST_DIM_V * GUEST_DIM_K
};

struct guest_work {
  uint16_t q[GUEST_N_TOKENS * GUEST_N_HEADS_K * GUEST_DIM_K];
  uint16_t k[GUEST_N_TOKENS * GUEST_N_HEADS_K * GUEST_DIM_K];
  uint16_t v[GUEST_N_TOKENS * GUEST_N_HEADS_V * GUEST_DIM_V];
  float g[GUEST_N_TOKENS * GUEST_N_HEADS_V];
  float beta[GUEST_N_TOKENS * GUEST_N_HEADS_V];
  uint16_t out[GUEST_N_TOKENS * GUEST_N_HEADS_V * GUEST_DIM_V];
  float pool[GUEST_N_PAGES * GUEST_STATE_ELEMS];
};

/* Fills the inputs, always with the same numbers; takes no memory. */
void guest_fill(struct guest_work *work);
/* One call on cleared outputs. */
gdn_status guest_run(const gdn_interface *gdn, gdn_ctx *ctx, struct guest_work *work, enum guest_call call);
/* Of all output bits of the last call. */
uint64_t guest_digest(const struct guest_work *work);

/* Threads of this process, open descriptors, resident bytes; -1 where /proc does not tell. */
int guest_n_threads(void);
int guest_n_files(void);
int64_t guest_resident_bytes(void);

#endif
