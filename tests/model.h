/* SPDX-License-Identifier: Apache-2.0
 * What rounding operands to bf16 costs the chunk form: the form in float64, exact but for those roundings. Its distance
 * from oracle.h is the error that the bf16 tiers are entitled to on the same input, whatever that input's T makes of
 * it. Shares no code with the library. */
#ifndef GDN_TESTS_MODEL_H
#define GDN_TESTS_MODEL_H

#include "gdn.h"

/* Each operand as a sum of so many bf16 numbers: 1 = rounded to nearest even, 2 = its rounding and that of the rest,
 * 0 = exact. N is T - I of a diagonal block of 32 tokens; R = beta (v - exp(G) K S^T), less L V' of earlier blocks.
 * Rows of R and V' are rounded as they are kept, over exp(G_i) and times what k_i owes, N, L and A as what is left to
 * multiply these with. In a steep chunk, where some exp(G_i) is not within 2^-60 .. 2^60, not over exp(G_i). */
struct model {
  int qk;        /* q and k with their norms and the scale; 0: these are owed, and the caller's bf16 rows are exact */
  int state;     /* S in K S^T and Q S^T */
  int n, resid;  /* N R */
  int init;      /* R in V' = R + N R */
  int l, delta;  /* L V' between blocks; V' also in A V' */
  int a;         /* A */
  int delta_out; /* V' in the update of the state; in a steep chunk once more, rounded and times exp(G_C - G) */
  int inside;    /* 1: a state inside a chunk, which later tokens may make a steep one */
};

/* As the tiers are. */
extern const struct model model_bf16;

/* One chunk of n <= 64 tokens: rows [n][dim] as the caller gives them, q_mult and k_mult the factors they owe. */
#define MODEL_TOKENS 64
struct model_chunk {
  int n, dim_k, dim_v;
  double q[MODEL_TOKENS * 256], k[MODEL_TOKENS * 256], v[MODEL_TOKENS * 256];
  double q_mult[MODEL_TOKENS], k_mult[MODEL_TOKENS], decay[MODEL_TOKENS], beta[MODEL_TOKENS];
};

/* state [dim_k][dim_v] becomes that after the chunk, out [n][dim_v]. */
void model_run_chunk(const struct model *m, const struct model_chunk *c, double *state, double *out);
/* As oracle_prefill; chunks end at absolute multiples of 64. With m->inside, states that end elsewhere are those of
 * checkpoints. */
void model_prefill(const struct model *m, const gdn_prefill_args *args, double *out, double *states);

/* Relative L2 distance. */
double model_error(const double *model, const double *want, int64_t n);
/* What a bf16 tier may be off in results of n_rows tokens and heads together: the model's error, and what f32 sums add,
 * directly and by moving numbers to the other side of a tie. */
double model_limit(double error, int64_t n_rows, double f32_limit);

#endif
