/* SPDX-License-Identifier: Apache-2.0
 * The gated delta rule in float64, token by token as its formula reads. Shares the argument structs of gdn.h with the
 * library, and no code. */
#ifndef GDN_TESTS_ORACLE_H
#define GDN_TESTS_ORACLE_H

#include "gdn.h"

/* Element i of head h of token t of an array, as a number. dim is the dense length of a head (1 for gates). */
double oracle_element(const gdn_tensor *x, int32_t default_dtype, int64_t n_heads, int64_t dim, int64_t t, int64_t h,
                      int64_t i);

/* out [n_tokens][n_heads_v][dim_v], states [n_seqs][n_heads_v][dim_v][dim_k], both dense. Reads every input that args
 * names, writes none of its outputs. States of empty sequences are their initial ones. */
void oracle_prefill(const gdn_prefill_args *args, double *out, double *states);
void oracle_decode(const gdn_decode_args *args, double *out, double *states);

#endif
