/* SPDX-License-Identifier: Apache-2.0
 * Calls with inputs as engines have them: every element type, state layout and dtype, kind of gates, head counts,
 * strides and index type, for the tests that go through combinations. All sequences have the same number of tokens, so
 * that one batch is a call of prefill and of decode. */
#ifndef GDN_TESTS_INPUTS_H
#define GDN_TESTS_INPUTS_H

#include "check.h"
#include "gdn.h"

enum inputs_gates { GATES_ABSENT, GATES_LOG, GATES_LINEAR, GATES_RAW, GATES_RAW_A, GATES_RAW_B, N_GATES };
enum inputs_heads { HEADS_EQUAL, HEADS_MORE_V, HEADS_MORE_Q, N_HEADS };
enum inputs_strides { STRIDES_DENSE, STRIDES_PADDED, STRIDES_FUSED, STRIDES_HEAD_MAJOR, N_STRIDES };

struct inputs_spec {
  enum inputs_heads heads;
  enum inputs_gates gates;
  enum inputs_strides strides; /* fused: q, k and v are slices of one projection and share a type */
  int dim_k, dim_v, n_seqs, n_tokens;
  int32_t q, k, v, out, beta, raw; /* dtypes; raw: of a, b, a_log and dt_bias */
  int32_t index;                   /* GDN_I32 or GDN_I64 */
  int32_t state_in, state_out, layout_in, layout_out;
  int in_place; /* one pool, where dtypes and layouts are the same */
};

struct inputs {
  struct inputs_spec spec;
  int n_heads; /* of states, gates and out */
  gdn_prefill_args prefill;
  gdn_decode_args decode;
  void *out, *pool_in, *pool_out; /* pool_out may be pool_in */
  size_t out_bytes, pool_in_bytes, pool_out_bytes;
  void *start;                                               /* what pool_out held */
  double *want_out, *want_states, *model_out, *model_states; /* in float64; with operands in bf16, see model.h */
};

/* Everything that spec leaves at random; then heads, gates, states and sizes may be set. */
struct inputs_spec inputs_random(struct check_rng *r);
/* Two sequences of common types, dense, K = V = 32, one pool of float32 states. */
struct inputs_spec inputs_plain(enum inputs_heads heads, enum inputs_gates gates, int n_tokens);
/* Arrays in guarded memory, inputs read-only, and the float64 results. */
struct inputs *inputs_make(const struct inputs_spec *spec, struct check_rng *r);
/* The results again, after a change of x->prefill. */
void inputs_oracle(struct inputs *x);
/* out to poison, pool_out to what it was. */
void inputs_reset(struct inputs *x);
/* What a call wrote to out, dense [n_tokens][n_heads][dim_v] of its dtype; to final_state, [n_seqs][n_heads][V][K] with
 * zeros where nothing is stored. */
void *inputs_take_out(const struct inputs *x, size_t *bytes);
void *inputs_take_states(const struct inputs *x, const gdn_states *pool, size_t *bytes);
/* Compares with float64: beyond the rounding to the type itself, limit relative to the norm, and where bf16 is set what
 * model.h allows on top. Then everything that the call may not write must be as before. Destroys the outputs. */
void inputs_check(struct inputs *x, double limit, int bf16);
/* What number is off beyond the rounding to dtype, which counts as its last step. */
double inputs_excess(double number, double want, int32_t dtype);

int inputs_bytes(int32_t dtype);
/* Rounds to nearest even. */
void inputs_put(void *data, int64_t at, int32_t dtype, double value);

#endif
