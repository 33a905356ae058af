/* SPDX-License-Identifier: Apache-2.0
 * The gated delta rule in float64, token by token as its formula reads. Shares the argument structs of gdn.h with the
 * library, and no code. */
#ifndef GDN_TESTS_ORACLE_H
#define GDN_TESTS_ORACLE_H

#include "gdn.h"

/* Element at of an array of GDN_F32, GDN_BF16 or GDN_F16. */
double oracle_number(const void *data, int64_t at, int32_t dtype);
/* Heads of states, gates and out. */
int oracle_heads(int n_heads_q, int n_heads_v);
/* Gates of token t from raw ones. */
double oracle_log_decay(const gdn_raw_gates *r, int64_t n_heads, int64_t t, int64_t h);
double oracle_beta(const gdn_raw_gates *r, int64_t n_heads, int64_t t, int64_t h);
/* Row i of a pool, and where element [j][i] of head h of a row lies, j in V, i in K. */
int64_t oracle_row(const gdn_states *s, int64_t i);
int64_t oracle_state_at(const gdn_states *s, int64_t n_heads, int dim_k, int dim_v, int64_t row, int64_t h, int j,
                        int i);

/* Element i of head h of token t of an array, as a number. dim is the dense length of a head (1 for gates). */
double oracle_element(const gdn_tensor *x, int32_t default_dtype, int64_t n_heads, int64_t dim, int64_t t, int64_t h,
                      int64_t i);

/* What head h of the states has at token t: the row of q, k or v as it is, the decay and beta. */
enum oracle_array { ORACLE_Q, ORACLE_K, ORACLE_V };
void oracle_row_of(const gdn_prefill_args *args, enum oracle_array which, int64_t t, int64_t h, double *row);
void oracle_gates(const gdn_prefill_args *args, int64_t t, int64_t h, double *decay, double *beta);
/* state [dim_k][dim_v] = the initial one of head h of sequence seq. */
void oracle_load_state(const gdn_prefill_args *args, int64_t seq, int64_t h, double *state);

/* out [n_tokens][n_heads_v][dim_v], states [n_seqs][n_heads_v][dim_v][dim_k], both dense. Reads every input that args
 * names, writes none of its outputs. States of empty sequences are their initial ones. */
void oracle_prefill(const gdn_prefill_args *args, double *out, double *states);
/* The tokens of one sequence from float64 states [n_heads][dim_v][dim_k], which become those after them. Reads no
 * cu_seqlens, no initial_state. */
void oracle_continue(const gdn_prefill_args *args, double *out, double *states);
void oracle_decode(const gdn_decode_args *args, double *out, double *states);

#endif
