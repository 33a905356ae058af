/* SPDX-License-Identifier: Apache-2.0
 * Every primitive of every tier against its definition or against ref, over edge shapes: outputs start as NaN between
 * guard bytes, inputs end at an unmapped page. --bench times the tested calls. The checks themselves are in
 * kernel_rows.c, kernel_recur.c, kernel_chunk_f32.c, kernel_chunk_bf16.c and kernel_chunk_state.c. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernel_case.h"
#include "platform.h"

static const struct {
  const char *name;
  void (*fn)(struct kcase *);
} checks[] = {
#define CHECK_ROW(name) {#name, check_##name},
    GDN_KERNEL_LIST(CHECK_ROW)
#undef CHECK_ROW
};

static const int test_lens[] = {1, 15, 16, 17, 33, 63, 64};
static const int test_dims[][2] = {{32, 32},  {64, 64},  {96, 128}, {128, 96}, {128, 128},
                                   {160, 32}, {32, 160}, {256, 64}, {64, 256}, {256, 256}};
/* Where vectors are emulated. */
static const int quick_dims[][2] = {{32, 64}, {64, 32}, {128, 128}, {160, 96}};
static const int bench_lens[] = {64};
static const int bench_dims[][2] = {{64, 64}, {128, 128}};

static const struct gdn_kernels *begun;

/* A failed check leaves its thread begun. */
static int kernel_teardown(void **state) {
  if (begun != NULL) begun->thread_end(0);
  begun = NULL;
  return check_teardown(state);
}

static void run_check(size_t row, const struct gdn_kernels *ref, const struct gdn_kernels *tier) {
  const int *lens = kernel_bench ? bench_lens : test_lens;
  const int(*dims)[2] = kernel_bench ? bench_dims : check_quick() ? quick_dims : test_dims;
  size_t n_lens = kernel_bench ? 1 : sizeof test_lens / sizeof test_lens[0];
  size_t n_dims = kernel_bench ? 2 : check_quick() ? 4 : sizeof test_dims / sizeof test_dims[0];
  for (size_t i = 0; i < n_dims; i++) {
    for (size_t j = 0; j < n_lens; j++) {
      struct kcase c = {
          .ref = ref, .tier = tier, .n = lens[j], .K = dims[i][0], .V = dims[i][1], .name = checks[row].name};
      c.rng = check_case("%s/n%d_k%d_v%d/%s", c.name, c.n, c.K, c.V, tier->tier);
      /* The check of begin and end calls them itself. */
      int chunk = strncmp(c.name, "chunk_", 6) == 0;
      if (chunk) begun = c.tier;
      uint32_t saved = chunk ? c.tier->thread_begin() : 0;
      int own =
          chunk && bf16_chunks(c.tier) && strcmp(c.name, "chunk_end") != 0 && strcmp(c.name, "chunk_state_at") != 0;
      if (own && !kernel_bench)
        check_chunk_bf16(&c);
      else
        checks[row].fn(&c);
      if (chunk) c.tier->thread_end(saved);
      begun = NULL;
      check_free_all();
    }
  }
}

/* Tiers that the processor has and that GDN_ISA, if set, does not cap. */
static int tier_usable(int i, const struct gdn_cpu *cpu) {
  static int capped;
  const char *cap = getenv("GDN_ISA");
  char text[128];
  if (i > 0 && cap != NULL && strcmp(gdn_tiers[i - 1].name, cap) == 0) capped = 1;
  if (gdn_tiers[i].fill == NULL) {
    check_skip(gdn_tiers[i].name, "not in this build");
  } else if ((gdn_tiers[i].cpu_flags & ~cpu->flags) != 0) {
    check_skip(gdn_tiers[i].name, gdn_cpu_missing(cpu, gdn_tiers[i].cpu_flags, text, sizeof text));
  } else if (capped) {
    check_skip(gdn_tiers[i].name, "capped by GDN_ISA");
  } else if (!check_tier_wanted(gdn_tiers[i].name)) {
    return 0;
  } else {
    return 1;
  }
  return 0;
}

#define N_CHECKS (sizeof checks / sizeof checks[0])
#define MAX_TIERS 8

/* One cmocka test: a primitive of a tier. For ref itself definitions and identities are what is checked. */
struct kernel_test {
  size_t row;
  int tier;
  char name[64];
};

static void kernel_agrees(void **state) {
  const struct kernel_test *test = *state;
  struct gdn_kernels ref, tier;
  gdn_kernels_fill(&ref, 0);
  gdn_kernels_fill(&tier, test->tier);
  run_check(test->row, &ref, test->tier == 0 ? &ref : &tier);
}

/* A table has no null entry, and each tier really is another one. */
static void kernels_tables_are_complete(void **state) {
  struct gdn_cpu cpu;
  (void)state;
  gdn_cpu_detect(&cpu);
  for (int i = 0; i < gdn_n_tiers; i++) {
    if (gdn_tiers[i].fill == NULL || (gdn_tiers[i].cpu_flags & ~cpu.flags) != 0) continue;
    check_case("table/%s", gdn_tiers[i].name);
    struct gdn_kernels t;
    memset(&t, 0, sizeof t);
    gdn_kernels_fill(&t, i);
    if (strcmp(t.tier, gdn_tiers[i].name) != 0) check_fail("names itself %s", t.tier);
    if (t.recur_cols != 32 && t.recur_cols != 64) check_fail("recur_cols = %d", t.recur_cols);
#define CHECK_ENTRY(name)                                                                                              \
  if (t.name == NULL) check_fail(#name " is null");
    GDN_KERNEL_LIST(CHECK_ENTRY)
#undef CHECK_ENTRY
  }
}

int main(int argc, char **argv) {
  static struct kernel_test kernel_tests[MAX_TIERS * N_CHECKS];
  static struct CMUnitTest tests[1 + MAX_TIERS * N_CHECKS];
  struct gdn_cpu cpu;
  size_t n = 0;
  kernel_bench = argc > 1 && strcmp(argv[1], "--bench") == 0;
  setvbuf(stdout, NULL, _IOLBF, 0);
  gdn_cpu_detect(&cpu);
  if (strstr(cpu.name, "emulated") != NULL) printf("emulated: every tier above ref\n");
  for (int i = 0; i < gdn_n_tiers && i < MAX_TIERS; i++) {
    if (!tier_usable(i, &cpu)) continue;
    for (size_t row = 0; row < N_CHECKS; row++) {
      struct kernel_test *t = &kernel_tests[n];
      t->row = row;
      t->tier = i;
      snprintf(t->name, sizeof t->name, "%s/%s", checks[row].name, gdn_tiers[i].name);
      tests[n++] = (struct CMUnitTest){t->name, kernel_agrees, NULL, kernel_teardown, t};
    }
  }
  tests[n++] = (struct CMUnitTest)cmocka_unit_test(kernels_tables_are_complete);
  return check_summary("test_kernels", _cmocka_run_group_tests("kernels", tests, n, NULL, NULL));
}
