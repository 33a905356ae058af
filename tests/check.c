/* SPDX-License-Identifier: Apache-2.0
 * What all tests share; see check.h. */
#include "check.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#define SEED_DEFAULT 20261130u
#define NAME_BYTES 192

static char case_name[NAME_BYTES] = "(no case)";
static uint64_t base_seed = SEED_DEFAULT;
static int64_t n_cases;
static int n_skips;
static struct {
  double share;
  char text[2 * NAME_BYTES];
} closest;

/* ---- cases ---- */

static int verbose(void) {
  return getenv("GDN_TEST_VERBOSE") != NULL;
}

struct check_rng check_case(const char *format, ...) {
  const char *seed = getenv("GDN_TEST_SEED");
  if (seed != NULL) base_seed = strtoull(seed, NULL, 0);
  va_list list;
  va_start(list, format);
  vsnprintf(case_name, sizeof case_name, format, list);
  va_end(list);
  n_cases++;
  if (verbose()) printf("%s\n", case_name);
  struct check_rng r = {base_seed};
  for (const char *c = case_name; *c != '\0'; c++) r.state = (r.state ^ (unsigned char)*c) * 0x100000001b3u;
  check_random_u64(&r);
  return r;
}

void check_fail(const char *format, ...) {
  char text[512];
  va_list list;
  va_start(list, format);
  vsnprintf(text, sizeof text, format, list);
  va_end(list);
  print_error("%s: %s (GDN_TEST_SEED=%llu)\n", case_name, text, (unsigned long long)base_seed);
  fail();
  abort();
}

void check_skip(const char *what, const char *why) {
  n_skips++;
  printf("skipped: %s: %s\n", what, why);
}

int check_summary(const char *program, int failures) {
  printf("%s: %lld cases, %d skipped, %d tests failed, seed %llu\n", program, (long long)n_cases, n_skips, failures,
         (unsigned long long)base_seed);
  if (closest.share > 0) printf("%s: closest to its limit: %s\n", program, closest.text);
  return failures;
}

uint64_t check_random_u64(struct check_rng *r) {
  uint64_t z = (r->state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

double check_uniform(struct check_rng *r, double lo, double hi) {
  return lo + (hi - lo) * (double)(check_random_u64(r) >> 11) * 0x1p-53;
}

double check_normal(struct check_rng *r) {
  double u = 1.0 - check_uniform(r, 0, 1);
  return sqrt(-2 * log(u)) * cos(6.283185307179586 * check_uniform(r, 0, 1));
}

/* ---- memory ---- */

#define GUARD_BYTES 256 /* in front, at least */
#define GUARD_VALUE 0xa7

struct block {
  struct block *next;
  unsigned char *map, *data;
  size_t map_bytes, inner_bytes, data_bytes; /* inner: between the two unmapped pages */
};

static struct block *blocks;

static void *alloc_aligned(size_t bytes, size_t align) {
  size_t page = (size_t)sysconf(_SC_PAGESIZE);
  struct block *b = malloc(sizeof *b);
  if (b == NULL) check_fail("out of memory");
  b->data_bytes = bytes;
  b->inner_bytes = (bytes + GUARD_BYTES + align + page - 1) / page * page;
  b->map_bytes = b->inner_bytes + 2 * page;
  b->map = mmap(NULL, b->map_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (b->map == MAP_FAILED || mprotect(b->map + page, b->inner_bytes, PROT_READ | PROT_WRITE) != 0) {
    free(b);
    check_fail("mmap of %zu bytes", bytes);
  }
  unsigned char *inner = b->map + page;
  b->data = inner + (b->inner_bytes - bytes) / align * align;
  memset(inner, GUARD_VALUE, (size_t)(b->data - inner));
  memset(b->data + bytes, GUARD_VALUE, (size_t)(inner + b->inner_bytes - b->data) - bytes);
  check_poison(b->data, bytes);
  b->next = blocks;
  blocks = b;
  return b->data;
}

void *check_alloc(size_t bytes) {
  return alloc_aligned(bytes, 64);
}

void *check_alloc_tight(size_t bytes) {
  return alloc_aligned(bytes, 1);
}

void check_protect(const void *block) {
  size_t page = (size_t)sysconf(_SC_PAGESIZE);
  for (struct block *b = blocks; b != NULL; b = b->next) {
    if (b->data == block && mprotect(b->map + page, b->inner_bytes, PROT_READ) == 0) return;
  }
  check_fail("check_protect: not a block");
}

/* 1 if a guard byte changed; its offset from the start of the data. */
static int guard_broken(const struct block *b, long long *offset) {
  const unsigned char *inner = b->map + (b->map_bytes - b->inner_bytes) / 2;
  const unsigned char *end = inner + b->inner_bytes;
  for (const unsigned char *p = inner; p < end; p++) {
    if (p == b->data) p += b->data_bytes;
    if (p == end) break;
    if (*p != GUARD_VALUE) {
      *offset = (long long)(p - b->data);
      return 1;
    }
  }
  return 0;
}

static void free_blocks(void) {
  while (blocks != NULL) {
    struct block *b = blocks;
    blocks = b->next;
    munmap(b->map, b->map_bytes);
    free(b);
  }
}

void check_free_all(void) {
  for (struct block *b = blocks; b != NULL; b = b->next) {
    long long offset;
    if (guard_broken(b, &offset)) {
      check_fail("write outside of an array of %zu bytes, at byte %lld", b->data_bytes, offset);
    }
  }
  free_blocks();
}

int check_teardown(void **state) {
  (void)state;
  free_blocks();
  return 0;
}

void check_poison(void *data, size_t bytes) {
  static const unsigned char pair[2] = {CHECK_POISON & 0xff, CHECK_POISON >> 8};
  unsigned char *p = data;
  size_t done = bytes < 2 ? bytes : 2;
  memcpy(p, pair, done);
  while (done < bytes) {
    size_t step = done < bytes - done ? done : bytes - done;
    memcpy(p + done, p, step);
    done += step;
  }
}

int check_is_poison(const void *data, size_t bytes) {
  static const unsigned char pair[2] = {CHECK_POISON & 0xff, CHECK_POISON >> 8};
  const unsigned char *p = data;
  if (bytes < 2) return memcmp(p, pair, bytes) == 0;
  return memcmp(p, pair, 2) == 0 && memcmp(p, p + 2, bytes - 2) == 0;
}

/* ---- numbers ---- */

uint16_t check_to_bf16(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  if (isnan(x)) return (uint16_t)(u >> 16 | 0x40);
  uint32_t kept = u >> 16, rest = u & 0xffff;
  if (rest > 0x8000 || (rest == 0x8000 && (kept & 1) != 0)) kept++;
  return (uint16_t)kept;
}

float check_from_bf16(uint16_t x) {
  uint32_t u = (uint32_t)x << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}

struct distance {
  double error2, norm2, worst;
  int64_t worst_at;
  double worst_x, worst_want;
};

/* free_error is forgiven. */
static void distance_add(struct distance *d, int64_t i, double x, double want, double free_error) {
  double e = fabs(x - want) - free_error;
  if (isfinite(want)) {
    if (!isfinite(x)) e = INFINITY;
    d->norm2 += want * want;
  } else {
    e = (isnan(want) ? isnan(x) : x == want) ? 0 : INFINITY;
  }
  if (e <= 0) return;
  d->error2 += e * e;
  if (e > d->worst) {
    d->worst = e;
    d->worst_at = i;
    d->worst_x = x;
    d->worst_want = want;
  }
}

static double distance_rel(const struct distance *d) {
  if (d->error2 == 0) return 0;
  return d->norm2 == 0 ? INFINITY : sqrt(d->error2 / d->norm2);
}

void check_limit(const char *what, double error, double limit) {
  if (verbose()) printf("  %s: error %.3g, limit %.3g\n", what, error, limit);
  if (!(error <= limit)) check_fail("%s: error %.4g, limit %.4g", what, error, limit);
  if (limit > 0 && error / limit > closest.share) {
    closest.share = error / limit;
    snprintf(closest.text, sizeof closest.text, "%s: %.64s: %.3g of %.3g", case_name, what, error, limit);
  }
}

static void distance_check(const char *what, const struct distance *d, double limit) {
  double rel = distance_rel(d);
  if (!(rel <= limit)) {
    check_fail("%s: relative L2 error %.4g, limit %.4g; worst at element %lld: %.9g instead of %.9g", what, rel, limit,
               (long long)d->worst_at, d->worst_x, d->worst_want);
  }
  check_limit(what, rel, limit);
}

static struct distance distance_of(const float *x, const double *want, int64_t n) {
  struct distance d = {0};
  for (int64_t i = 0; i < n; i++) distance_add(&d, i, x[i], want[i], 0);
  return d;
}

/* Half a unit in the last place of x as bf16, seen from the wanted value. */
static double bf16_half_ulp(double want) {
  int exponent;
  frexp(want, &exponent);
  return ldexp(1.0, (exponent < -125 ? -125 : exponent) - 9);
}

static struct distance distance_of_bf16(const uint16_t *x, const double *want, int64_t n) {
  struct distance d = {0};
  for (int64_t i = 0; i < n; i++) distance_add(&d, i, check_from_bf16(x[i]), want[i], bf16_half_ulp(want[i]));
  return d;
}

void check_close(const char *what, const float *x, const double *want, int64_t n, double limit) {
  struct distance d = distance_of(x, want, n);
  distance_check(what, &d, limit);
}

void check_close_bf16(const char *what, const uint16_t *x, const double *want, int64_t n, double limit) {
  struct distance d = distance_of_bf16(x, want, n);
  distance_check(what, &d, limit);
}

void check_close_f32(const char *what, const float *x, const float *want, int64_t n, double limit) {
  struct distance d = {0};
  for (int64_t i = 0; i < n; i++) distance_add(&d, i, x[i], want[i], 0);
  distance_check(what, &d, limit);
}

double check_error_bf16(const uint16_t *x, const double *want, int64_t n) {
  struct distance d = distance_of_bf16(x, want, n);
  return distance_rel(&d);
}

double check_rel_l2_bf16(const uint16_t *x, const float *want, int64_t n) {
  struct distance d = {0};
  for (int64_t i = 0; i < n; i++) distance_add(&d, i, check_from_bf16(x[i]), want[i], 0);
  return distance_rel(&d);
}

double check_rel_l2_f32(const float *x, const float *want, int64_t n) {
  struct distance d = {0};
  for (int64_t i = 0; i < n; i++) distance_add(&d, i, x[i], want[i], 0);
  return distance_rel(&d);
}

void check_same_bits(const char *what, const void *a, const void *b, size_t bytes, size_t elem_bytes) {
  if (bytes == 0 || memcmp(a, b, bytes) == 0) return;
  const unsigned char *p = a, *q = b;
  size_t i = 0;
  while (p[i] == q[i]) i++;
  i = i / elem_bytes * elem_bytes;
  uint32_t x = 0, y = 0;
  memcpy(&x, p + i, elem_bytes < 4 ? elem_bytes : 4);
  memcpy(&y, q + i, elem_bytes < 4 ? elem_bytes : 4);
  check_fail("%s: bits differ, first at element %zu of %zu: %#x and %#x", what, i / elem_bytes, bytes / elem_bytes, x,
             y);
}

/* ---- tiers and contexts ---- */

static const struct check_tier tier_values[] = {{"ref", GDN_ISA_REF, 0},
                                                {"avx2", GDN_ISA_AVX2, 0},
                                                {"avx512", GDN_ISA_AVX512, 0},
                                                {"avx512bf16", GDN_ISA_AVX512BF16, 1},
                                                {"amx", GDN_ISA_AMX, 1}};

int check_tier_wanted(const char *name) {
  const char *at = getenv("GDN_TEST_TIERS");
  size_t len = strlen(name);
  if (at == NULL) return 1;
  for (; *at != '\0'; at += strcspn(at, ","), at += *at == ',') {
    if (strcspn(at, ",") == len && strncmp(at, name, len) == 0) return 1;
  }
  return 0;
}

int check_quick(void) {
  return getenv("GDN_TEST_QUICK") != NULL;
}

double check_form_limit(const struct check_tier *tier, int32_t form, double f32_limit, double bf16_limit) {
  return tier->bf16_chunks && form == GDN_FORM_CHUNK ? bf16_limit : f32_limit;
}

void check_ok(const char *call, gdn_status status) {
  if (status != GDN_OK) check_fail("%s: %s: %s", call, gdn_status_name(status), gdn_last_error());
}

void check_refused(gdn_status got, gdn_status want, const char *name) {
  if (got != want || strstr(gdn_last_error(), name) == NULL)
    check_fail("%s expected with \"%s\", got %s: %s", gdn_status_name(want), name, gdn_status_name(got),
               gdn_last_error());
}

int check_tiers(struct check_tier tiers[CHECK_TIERS_MAX]) {
  gdn_ctx_args args = {.struct_size = sizeof args, .n_threads = 1, .pin = GDN_PIN_OFF};
  gdn_ctx *ctx = NULL;
  check_ok("gdn_ctx_create", gdn_ctx_create(&args, &ctx));
  gdn_info info = {.struct_size = sizeof info};
  check_ok("gdn_ctx_info", gdn_ctx_info(ctx, &info));
  if (strstr(info.cpu, "emulated") != NULL) printf("emulated: every tier above ref\n");
  int n = 0;
  for (int i = 0; i < info.n_tiers && n < CHECK_TIERS_MAX; i++) {
    size_t j = 0;
    while (j < sizeof tier_values / sizeof tier_values[0] && strcmp(tier_values[j].name, info.tiers[i].name) != 0) j++;
    if (j == sizeof tier_values / sizeof tier_values[0])
      check_fail("check.c does not know tier %s", info.tiers[i].name);
    if (!check_tier_wanted(info.tiers[i].name)) continue;
    if (info.tiers[i].available) {
      tiers[n++] = tier_values[j];
    } else {
      check_skip(info.tiers[i].name, info.tiers[i].reason);
    }
  }
  gdn_ctx_destroy(ctx);
  if (n == 0) check_fail("no tier is available");
  return n;
}

gdn_ctx *check_ctx(const struct check_tier *tier, int n_threads) {
  gdn_ctx_args args = {.struct_size = sizeof args, .n_threads = n_threads, .isa = tier->isa, .pin = GDN_PIN_OFF};
  gdn_ctx *ctx = NULL;
  check_ok("gdn_ctx_create", gdn_ctx_create(&args, &ctx));
  gdn_info info = {.struct_size = sizeof info};
  check_ok("gdn_ctx_info", gdn_ctx_info(ctx, &info));
  if (strcmp(info.isa, tier->name) != 0) check_fail("asked for tier %s, got %s", tier->name, info.isa);
  if (info.n_threads != n_threads) check_fail("asked for %d threads, got %d", n_threads, (int)info.n_threads);
  return ctx;
}

int check_contexts(struct check_tier tiers[CHECK_TIERS_MAX], gdn_ctx *contexts[CHECK_TIERS_MAX]) {
  int n = check_tiers(tiers);
  for (int i = 0; i < n; i++) contexts[i] = check_ctx(&tiers[i], 2);
  return n;
}

void check_contexts_end(gdn_ctx *contexts[CHECK_TIERS_MAX], int n) {
  for (int i = 0; i < n; i++) gdn_ctx_destroy(contexts[i]);
}

/* ---- golden files ---- */

/* The dimensions in the header text "... 'shape': (212, 1, 64), ...". */
static int64_t parse_shape(const char *header, int64_t shape[4]) {
  const char *p = strstr(header, "'shape': (");
  if (p == NULL) return -1;
  p += strlen("'shape': (");
  int64_t n = 1;
  for (int i = 0; i < 4; i++) {
    char *end;
    shape[i] = strtoll(p, &end, 10);
    if (end == p) {
      shape[i] = 1;
      continue;
    }
    n *= shape[i];
    p = end + strspn(end, ", ");
  }
  return n;
}

int64_t check_load_npy(const char *dir, const char *name, const char *descr, int64_t shape[4], void **data) {
  char path[512], header[512] = "", wanted[32];
  unsigned char magic[10];
  snprintf(path, sizeof path, "%s/%s.npy", dir, name);
  snprintf(wanted, sizeof wanted, "'descr': '%s'", descr);
  FILE *f = fopen(path, "rb");
  if (f == NULL) check_fail("cannot open %s", path);
  size_t header_bytes = 0;
  if (fread(magic, 1, 10, f) == 10 && memcmp(magic, "\x93NUMPY\x01", 7) == 0) {
    header_bytes = magic[8] | (size_t)magic[9] << 8;
  }
  int ok = header_bytes > 0 && header_bytes < sizeof header && fread(header, 1, header_bytes, f) == header_bytes &&
           strstr(header, wanted) != NULL && strstr(header, "'fortran_order': False") != NULL;
  int64_t n = ok ? parse_shape(header, shape) : -1;
  if (n >= 0) {
    size_t bytes = (size_t)n * (size_t)(descr[2] - '0');
    *data = check_alloc(bytes);
    ok = fread(*data, 1, bytes, f) == bytes && fgetc(f) == EOF;
  }
  fclose(f);
  if (n < 0 || !ok) check_fail("%s is not a version 1 file of %s", path, descr);
  return n;
}
