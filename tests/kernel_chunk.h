/* SPDX-License-Identifier: Apache-2.0
 * Two chunks of one value head for the checks of the chunk form: their inputs, their scratch, and runs of the
 * primitives over them. */
#ifndef GDN_TESTS_KERNEL_CHUNK_H
#define GDN_TESTS_KERNEL_CHUNK_H

#include "kernel_case.h"

/* In order of work. */
enum stage { QK, GATES, MASK, SOLVE, BEGIN, DELTA, OUT, STATE, END };

/* Two chunks of one value head: a full one, whose leftovers in scratch the second must not see, and one of n tokens. */
struct chunk_data {
  struct gdn_rows q, k, v, g, beta;
  float *state; /* panels */
};

#define FIRST_LEN GDN_CHUNK

struct chunk_data random_chunks(struct kcase *c);
/* Gates of both chunks that a bf16 tier's rows of V' can carry: the second's may else be -inf. */
void make_gentle(const struct kcase *c, struct chunk_data *d);
/* Scratch of its own, as poison, and the inputs at the first chunk. */
struct gdn_chunk *make_chunk(const struct kcase *c, const struct chunk_data *d, int use_jit, int32_t out_dtype);
/* The chunk of n tokens from start on. */
void set_chunk(struct gdn_chunk *x, const struct chunk_data *d, int start, int n);
struct gdn_rows rows_from(struct gdn_rows rows, int i);

/* Makes the chunk one that starts from zero: such a state for begin, or, in tiers that know it, the word alone. */
void start_from_zero(struct gdn_chunk *x, int in_memory);

/* Primitives from delta up to last, over these columns. */
void run_columns(const struct gdn_kernels *k, struct gdn_chunk *x, int col, int n_cols, enum stage last);
/* Primitives up to last, over columns in slices of width. Where that is all of them, what a primitive makes and uses as
 * scratch is poison before each; else it is what earlier calls left there. */
void run_stages(const struct gdn_kernels *k, struct gdn_chunk *x, int width, int begin, enum stage last);
/* The first chunk whole, the second up to last. */
struct gdn_chunk *run_chunks(const struct kcase *c, const struct gdn_kernels *k, const struct chunk_data *d, int width,
                             enum stage last, int32_t out_dtype);

/* The out of x as [n][V] floats. */
float *out_numbers(const struct gdn_chunk *x);
void check_same_out(const char *what, const struct gdn_chunk *a, const struct gdn_chunk *b);
/* f32 sums over K and over up to 64 tokens in two orders. */
double chunk_limit(const struct kcase *c);
/* kernel_chunk_bf16.c: what a bf16 tier's state after n_at tokens of the second chunk may be off, relative to want. */
double bf16_state_at_limit(const struct kcase *c, const struct chunk_data *d, int n_at, const float *want);

#endif
