/* SPDX-License-Identifier: Apache-2.0
 * Packed batches for the tests of prefill and decode: numbers first, then their place in guarded caller memory in one
 * of several layouts, the float64 results, and the comparison. */
#ifndef GDN_TESTS_BATCH_H
#define GDN_TESTS_BATCH_H

#include <stdint.h>

#include "check.h"
#include "gdn.h"

struct batch_shape {
  int n_heads_k, n_heads_v, dim_k, dim_v, n_seqs;
  const int32_t *lens; /* [n_seqs] */
};

/* Where the arrays lie. Whatever is not an element holds CHECK_POISON. */
enum batch_layout {
  BATCH_DENSE,      /* strides 0 */
  BATCH_FUSED,      /* q, k and v are slices of one projection */
  BATCH_PADDED,     /* gaps after heads and after tokens, everywhere */
  BATCH_HEAD_MAJOR, /* [head][token][dim] */
  BATCH_N_LAYOUTS
};

enum batch_states {
  BATCH_NO_STATES,
  BATCH_PACKED, /* row i for sequence i, initial and final apart */
  BATCH_POOL,   /* rows of one padded pool: in place, elsewhere, shared, -1; unused rows hold poison */
  BATCH_N_STATES
};

struct batch {
  struct batch_shape shape;
  int64_t n_tokens;
  int32_t *cu_seqlens;
  /* The numbers, dense; batch_place rounds them to their type. */
  float *q, *k, *v, *g, *beta;
  /* The call, made by batch_place; callers may change flags, form, scale and eps. */
  gdn_prefill_args args;
  int64_t out_elems;            /* of the out buffer, gaps included */
  float *states, *states_start; /* the buffer that final_state lies in, and what it held before the call */
  int64_t states_elems;
  /* Made by batch_oracle: the results, and those of the chunk form with operands in bf16. */
  double *want_out, *want_states, *model_out, *model_states;
};

/* Numbers in the range of real layers: normal q, k, v, g in -0.5 .. 0, beta in 0 .. 1. */
struct batch *batch_make(const struct batch_shape *shape, struct check_rng *r);
/* beta_dtype: GDN_F32, GDN_BF16, or 0 for absent. with_g 0 = absent. Inputs become read-only. */
void batch_place(struct batch *b, enum batch_layout layout, enum batch_states states, int32_t beta_dtype, int with_g,
                 struct check_rng *r);
void batch_oracle(struct batch *b);
/* Outputs back to poison, states to what they were. */
void batch_reset(struct batch *b);

/* What a call wrote, dense: out [n_tokens][n_heads_v][dim_v], states [n_seqs][n_heads_v][dim_v][dim_k] (zeros for
 * sequences that stored none). */
struct batch_result {
  uint16_t *out;
  float *states;
};
struct batch_result batch_take(const struct batch *b);
/* Same bits of sequences i of a and j of b, which have the same length. */
void batch_same(const char *what, const struct batch *a, const struct batch_result *x, int64_t i, const struct batch *b,
                const struct batch_result *y, int64_t j);
/* Compares what a call wrote with the oracle, and fails if anything else changed. Destroys the outputs. */
void batch_check(struct batch *b, double limit);
/* The same for what a form of a tier gave; where products have bf16 operands, what model.h allows comes on top. */
void batch_check_form(struct batch *b, const struct check_tier *tier, double limit);

/* One call on fresh outputs. */
void batch_prefill(gdn_ctx *ctx, struct batch *b, int32_t form);
/* The decode call of token t of every sequence; all sequences must have one length. From t = 1 on, what was the final
 * state is read. */
gdn_decode_args batch_decode_args(const struct batch *b, int64_t t);

#endif
