/* SPDX-License-Identifier: Apache-2.0
 * What float32 may be off when several tokens take their sums on the state before the first one (gdn_decode_tokens_fn
 * in kernels.h): the rule in float64, token by token, with that formula's running error bound. Shares no code with the
 * library. */
#ifndef GDN_TESTS_VERIFY_BOUND_H
#define GDN_TESTS_VERIFY_BOUND_H

#define VERIFY_TOKENS_MAX 32

/* The tokens of one value head, q and k as the kernels get them: normalised, q times scale. */
struct verify_head {
  int n, dim_k, dim_v;
  const double *q, *k;        /* [n][dim_k] */
  const double *decay, *beta; /* [n] */
  const double *v;            /* [n][dim_v] */
  const double *state;        /* [dim_k][dim_v] before the first token */
  const double *input_error;  /* [n] how far rounded inputs move a term of token t, relative; null = inputs are exact */
};

/* out [n][dim_v], and limit [n][dim_v] of what a float32 result may differ from it. */
void verify_bound(const struct verify_head *x, double *out, double *limit);

#endif
