/* SPDX-License-Identifier: Apache-2.0
 * What all tests share: named cases with reproducible random numbers, guarded memory, comparisons, the tiers of this
 * machine, and golden files. Depends on gdn.h only, so that it also serves tests of the installed library. */
#ifndef GDN_TESTS_CHECK_H
#define GDN_TESTS_CHECK_H

#include <stddef.h>
#include <stdint.h>

#include "gdn.h"

/* ---- cases ---- */

struct check_rng {
  uint64_t state;
};

/* Starts a case: its name is printed with every failure, with the seed. The generator depends on the seed
 * (environment variable GDN_TEST_SEED) and the name only, so one case can be repeated alone. */
struct check_rng check_case(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Fails the running cmocka test with case, seed and this text. */
void check_fail(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));
/* Counts and prints something this machine cannot test. */
void check_skip(const char *what, const char *why);
/* Prints the number of cases and skips and how close the comparisons came to their limits. Returns failures. */
int check_summary(const char *program, int failures);

uint64_t check_random_u64(struct check_rng *r);
double check_uniform(struct check_rng *r, double lo, double hi);
double check_normal(struct check_rng *r);

/* ---- memory ---- */

/* Bytes that end at an unmapped page (less than 64 bytes before it if they are no multiple of 64), start 64-byte
 * aligned, and have an unmapped page and guard bytes in front. Filled with CHECK_POISON. */
void *check_alloc(size_t bytes);
/* The same, but the last byte is the last before the unmapped page, whatever that does to the alignment. */
void *check_alloc_tight(size_t bytes);
/* From now on a write to the block faults. */
void check_protect(const void *block);
/* Fails if a guard byte changed; then frees all blocks. */
void check_free_all(void);
/* For teardown: frees all blocks without looking. */
int check_teardown(void **state);

/* A signalling NaN as bf16 and, twice, as f32. */
#define CHECK_POISON 0x7fa0u
void check_poison(void *data, size_t bytes);
int check_is_poison(const void *data, size_t bytes);

/* ---- numbers ---- */

uint16_t check_to_bf16(float x); /* to nearest even, NaN stays NaN */
float check_from_bf16(uint16_t x);

/* Relative L2 distance |x - want| / |want| must not exceed limit; a value that is not finite must be wanted so. */
void check_close(const char *what, const float *x, const double *want, int64_t n, double limit);
void check_close_f32(const char *what, const float *x, const float *want, int64_t n, double limit);
/* For values rounded to bf16: what an element is off beyond half a unit of its own last place counts against limit, so
 * that errors far below bf16's resolution show. */
void check_close_bf16(const char *what, const uint16_t *x, const double *want, int64_t n, double limit);
/* What that compares with limit. */
double check_error_bf16(const uint16_t *x, const double *want, int64_t n);
/* Plain relative L2 distance of bf16 values, with their rounding. */
double check_rel_l2_bf16(const uint16_t *x, const float *want, int64_t n);
double check_rel_l2_f32(const float *x, const float *want, int64_t n);
void check_same_bits(const char *what, const void *a, const void *b, size_t bytes, size_t elem_bytes);
/* A measured error against its limit: fails when over, else remembered for the summary. */
void check_limit(const char *what, double error, double limit);

/* ---- tiers and contexts ---- */

struct check_tier {
  const char *name;
  int32_t isa;
  int bf16_chunks; /* products of its chunk form have bf16 operands */
};

#define CHECK_TIERS_MAX 8
/* The tiers a context can use here, lowest first; the others are counted as skipped. The environment variable
 * GDN_TEST_TIERS, names with commas between, leaves only those. */
int check_tiers(struct check_tier tiers[CHECK_TIERS_MAX]);
/* bf16_limit where products have bf16 operands, else f32_limit. */
double check_form_limit(const struct check_tier *tier, int32_t form, double f32_limit, double bf16_limit);
/* Whether GDN_TEST_TIERS leaves this tier. */
int check_tier_wanted(const char *name);
/* 1 where instructions are emulated: a test may use smaller numbers of the same. */
int check_quick(void);
/* A context that runs exactly this tier. */
gdn_ctx *check_ctx(const struct check_tier *tier, int n_threads);
/* The tiers likewise, each with a context of two threads; for check_contexts_end. */
int check_contexts(struct check_tier tiers[CHECK_TIERS_MAX], gdn_ctx *contexts[CHECK_TIERS_MAX]);
void check_contexts_end(gdn_ctx *contexts[CHECK_TIERS_MAX], int n);
/* Fails unless status is GDN_OK. */
void check_ok(const char *call, gdn_status status);
/* Fails unless got is want and the library's text names this. */
void check_refused(gdn_status got, gdn_status want, const char *name);

/* ---- golden files ---- */

/* Reads the .npy file dir/name.npy of the given type ("<f4", "<u2", "<i4") into a block of check_alloc. Returns the
 * number of elements; shape gets up to 4 dimensions, the rest 1. Fails the test if anything is wrong. */
int64_t check_load_npy(const char *dir, const char *name, const char *descr, int64_t shape[4], void **data);

#endif
