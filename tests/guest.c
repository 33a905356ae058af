/* SPDX-License-Identifier: Apache-2.0
 * The batch of guest.h, and what a process holds. */
#include "guest.h"

#include <dirent.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static float next_uniform(uint32_t *seed) {
  *seed = *seed * 1664525u + 1013904223u;
  return (float)(*seed >> 8) / (float)(1 << 24);
}

static uint16_t bf16_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return (uint16_t)(bits >> 16);
}

static void fill_bf16(uint16_t *x, int n, float span, uint32_t *seed) {
  for (int i = 0; i < n; i++) x[i] = bf16_of(span * (next_uniform(seed) - 0.5f));
}

void guest_fill(struct guest_work *work) {
  uint32_t seed = 20261130;
  memset(work, 0, sizeof *work);
  fill_bf16(work->q, sizeof work->q / sizeof *work->q, 2.0f, &seed);
  fill_bf16(work->k, sizeof work->k / sizeof *work->k, 2.0f, &seed);
  fill_bf16(work->v, sizeof work->v / sizeof *work->v, 4.0f, &seed);
  for (int i = 0; i < GUEST_N_TOKENS * GUEST_N_HEADS_V; i++) {
    work->g[i] = -0.2f * next_uniform(&seed);
    work->beta[i] = next_uniform(&seed);
  }
}

static const int32_t cu_seqlens[GUEST_N_SEQS + 1] = {0, 70, 71, 201};

static gdn_prefill_args prefill_args(struct guest_work *work) {
  return (gdn_prefill_args){.struct_size = sizeof(gdn_prefill_args),
                            .flags = GDN_L2NORM_QK,
                            .n_seqs = GUEST_N_SEQS,
                            .n_tokens = GUEST_N_TOKENS,
                            .n_heads_k = GUEST_N_HEADS_K,
                            .n_heads_v = GUEST_N_HEADS_V,
                            .dim_k = GUEST_DIM_K,
                            .dim_v = GUEST_DIM_V,
                            .cu_seqlens = cu_seqlens,
                            .q = {.data = work->q},
                            .k = {.data = work->k},
                            .v = {.data = work->v},
                            .g = {.data = work->g},
                            .beta = {.data = work->beta},
                            .out = {.data = work->out}};
}

static gdn_status run_decode(const gdn_interface *gdn, gdn_ctx *ctx, struct guest_work *work) {
  const gdn_states pool = {.data = work->pool, .n_rows = GUEST_N_PAGES};
  const gdn_decode_args args = {.struct_size = sizeof args,
                                .flags = GDN_L2NORM_QK,
                                .n_seqs = GUEST_N_PAGES,
                                .n_heads_k = GUEST_N_HEADS_K,
                                .n_heads_v = GUEST_N_HEADS_V,
                                .dim_k = GUEST_DIM_K,
                                .dim_v = GUEST_DIM_V,
                                .q = {.data = work->q},
                                .k = {.data = work->k},
                                .v = {.data = work->v},
                                .g = {.data = work->g},
                                .beta = {.data = work->beta},
                                .out = {.data = work->out},
                                .initial_state = pool,
                                .final_state = pool};
  return gdn->decode(ctx, &args);
}

static gdn_status run_paged(const gdn_interface *gdn, gdn_ctx *ctx, struct guest_work *work) {
  static const int32_t indices[] = {4, 0, 6, 2, 1, 5}, indptr[] = {0, 2, 3, 6}, last_page_len[] = {6, 1, 2};
  gdn_prefill_args args = prefill_args(work);
  const gdn_page_table table = {.struct_size = sizeof table,
                                .n_seqs = GUEST_N_SEQS,
                                .n_pages = GUEST_N_PAGES,
                                .page_size = 64,
                                .n_page_indices = 6,
                                .page_indices = indices,
                                .page_indptr = indptr,
                                .last_page_len = last_page_len};
  const gdn_paged_args paged = {
      .struct_size = sizeof paged, .pool = {.data = work->pool, .n_rows = GUEST_N_PAGES}, .table = &table};
  return gdn->prefill_paged(ctx, &args, &paged);
}

gdn_status guest_run(const gdn_interface *gdn, gdn_ctx *ctx, struct guest_work *work, enum guest_call call) {
  memset(work->out, 0, sizeof work->out);
  memset(work->pool, 0, sizeof work->pool);
  if (call == GUEST_DECODE) return run_decode(gdn, ctx, work);
  if (call == GUEST_PAGED) return run_paged(gdn, ctx, work);
  gdn_prefill_args args = prefill_args(work);
  args.form = call == GUEST_CHUNK ? GDN_FORM_CHUNK : GDN_FORM_RECURRENT;
  args.final_state = (gdn_states){.data = work->pool, .n_rows = GUEST_N_PAGES};
  return gdn->prefill(ctx, &args);
}

static uint64_t mix(uint64_t digest, const void *data, size_t bytes) {
  const unsigned char *at = data;
  for (size_t i = 0; i < bytes; i++) digest = (digest ^ at[i]) * 0x100000001b3ull;
  return digest;
}

uint64_t guest_digest(const struct guest_work *work) {
  return mix(mix(0xcbf29ce484222325ull, work->out, sizeof work->out), work->pool, sizeof work->pool);
}

/* ---- what the process holds ---- */

static int count_entries(const char *name) {
  DIR *dir = opendir(name);
  if (!dir) return -1;
  int n = 0;
  for (struct dirent *entry = readdir(dir); entry; entry = readdir(dir)) n += entry->d_name[0] != '.';
  closedir(dir);
  return n;
}

int guest_n_threads(void) {
  return count_entries("/proc/self/task");
}

int guest_n_files(void) {
  return count_entries("/proc/self/fd");
}

int64_t guest_resident_bytes(void) {
  long long n_pages = -1;
  FILE *file = fopen("/proc/self/statm", "r");
  if (!file) return -1;
  if (fscanf(file, "%*s %lld", &n_pages) != 1) n_pages = -1;
  fclose(file);
  return n_pages < 0 ? -1 : n_pages * sysconf(_SC_PAGESIZE);
}
