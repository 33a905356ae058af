/* SPDX-License-Identifier: Apache-2.0
 * Makes and frees a context: tier, cores, workers, scratch. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine.h"

#define MAX_THREADS 4096

/* ---- tier ---- */

/* The highest tier that GDN_ISA allows, as an index; -1 with an error text if it names none. */
static int env_cap(const char **value) {
  const char *name = *value = getenv("GDN_ISA");
  if (!name || !*name) return gdn_n_tiers - 1;
  for (int i = 0; i < gdn_n_tiers; i++)
    if (!strcmp(name, gdn_tiers[i].name)) return i;
  return -1;
}

static void tier_names(char *text, size_t bytes) {
  size_t at = 0;
  text[0] = 0;
  for (int i = 0; i < gdn_n_tiers && at < bytes; i++)
    at += (size_t)snprintf(text + at, bytes - at, "%s%s", i ? ", " : "", gdn_tiers[i].name);
}

/* Fills ctx->tiers and ctx->tier: the highest tier that build, processor, argument and environment all allow. */
static gdn_status choose_tier(gdn_ctx *ctx, int32_t isa) {
  const char *env;
  int cap = env_cap(&env), arg_cap = gdn_n_tiers - 1;
  char names[128];
  tier_names(names, sizeof names);
  if (cap < 0) return gdn_fail(GDN_E_OPTION, "environment variable GDN_ISA = \"%s\": expected one of %s", env, names);
  if (isa != GDN_ISA_DEFAULT) {
    for (arg_cap = gdn_n_tiers - 1; arg_cap >= 0 && gdn_tiers[arg_cap].isa != isa; arg_cap--)
      ;
    if (arg_cap < 0) return gdn_fail(GDN_E_OPTION, "isa = %d: not one of GDN_ISA_*", isa);
  }
  for (int i = 0; i < gdn_n_tiers; i++) {
    const struct gdn_tier *tier = &gdn_tiers[i];
    char *reason = ctx->reasons[i];
    size_t bytes = sizeof ctx->reasons[i];
    if (!tier->fill)
      snprintf(reason, bytes, "the compiler of this build could not build it");
    else if ((ctx->cpu.flags & tier->cpu_flags) != tier->cpu_flags)
      gdn_cpu_missing(&ctx->cpu, tier->cpu_flags, reason, bytes);
    else if (i > arg_cap)
      snprintf(reason, bytes, "capped by isa = %s", gdn_tiers[arg_cap].name);
    else if (i > cap)
      snprintf(reason, bytes, "capped by GDN_ISA=%s", env);
    else
      ctx->tier = i;
    ctx->tiers[i] = (gdn_tier_info){tier->name, !*reason, 0, reason};
  }
  gdn_kernels_fill(&ctx->kernels, ctx->tier);
  return GDN_OK;
}

/* ---- workers ---- */

static void describe_placement(gdn_ctx *ctx) {
  int error = 0, n_bound = gdn_team_n_bound(ctx->team, &error);
  char cpus[160];
  char *text = ctx->placement;
  const size_t bytes = sizeof ctx->placement;
  const char *note = gdn_topo_note(ctx->topo);
  ctx->pinned = n_bound == ctx->n_threads;
  if (ctx->pinned) {
    gdn_topo_describe(ctx->topo, ctx->n_threads, text, bytes);
  } else {
    gdn_topo_describe(ctx->topo, gdn_topo_n_units(ctx->topo), cpus, sizeof cpus);
    if (error)
      snprintf(text, bytes, "%d of %d workers bound: %s", n_bound, ctx->n_threads, strerror(error));
    else
      snprintf(text, bytes, "not bound: pin = GDN_PIN_OFF%s%s", *cpus ? "; anywhere on " : "", cpus);
  }
  const size_t at = strlen(text);
  if (*note) snprintf(text + at, bytes - at, " (%s)", note);
}

/* The cores that the arguments ask for. */
static gdn_status find_place(gdn_ctx *ctx, const gdn_ctx_args *a) {
  char reason[160];
  const char *list = a->place == GDN_PLACE_CPU_LIST ? a->cpu_list : NULL;
  const int node = a->place == GDN_PLACE_NUMA_NODE ? a->numa_node : GDN_ANY_NODE;
  ctx->topo = gdn_topo_create(list, node, reason, sizeof reason);
  if (ctx->topo) return GDN_OK;
  if (!*reason) return gdn_fail(GDN_E_NOMEM, "no memory for the list of cores");
  if (list) return gdn_fail(GDN_E_CPUS, "cpu_list = \"%.64s\": %s", list, reason);
  return gdn_fail(GDN_E_CPUS, "numa_node = %d: %s", node, reason);
}

static gdn_status start_workers(gdn_ctx *ctx, const gdn_ctx_args *a) {
  gdn_status status = find_place(ctx, a);
  if (status) return status;
  ctx->n_threads = a->n_threads ? a->n_threads : gdn_topo_n_workers(ctx->topo);
  size_t n = (size_t)ctx->n_threads;
  ctx->scratch = gdn_mem_alloc(n * sizeof *ctx->scratch);
  ctx->shares = gdn_mem_alloc(n * sizeof *ctx->shares);
  if (!ctx->scratch || !ctx->shares)
    return gdn_fail(GDN_E_NOMEM, "no memory for n_threads = %d workers", ctx->n_threads);
  memset(ctx->scratch, 0, n * sizeof *ctx->scratch);
  int error = gdn_team_create(&ctx->team, ctx->n_threads, ctx->topo, a->pin != GDN_PIN_OFF);
  if (error)
    return gdn_fail(GDN_E_THREADS, "n_threads = %d: the workers could not be started: %s", ctx->n_threads,
                    strerror(error));
  describe_placement(ctx);
  return GDN_OK;
}

static gdn_status check_args(const gdn_ctx_args *a) {
  if (a->n_threads < 0 || a->n_threads > MAX_THREADS)
    return gdn_fail(GDN_E_SIZE, "n_threads = %d: expected 0 .. %d", a->n_threads, MAX_THREADS);
  if (a->reserved) return gdn_fail(GDN_E_OPTION, "reserved = %d: expected 0", a->reserved);
  if (a->pin < GDN_PIN_DEFAULT || a->pin > GDN_PIN_OFF)
    return gdn_fail(GDN_E_OPTION, "pin = %d: not one of GDN_PIN_*", a->pin);
  if (a->place < GDN_PLACE_DEFAULT || a->place > GDN_PLACE_NUMA_NODE)
    return gdn_fail(GDN_E_OPTION, "place = %d: not one of GDN_PLACE_*", a->place);
  if (a->cpu_list && a->place != GDN_PLACE_CPU_LIST)
    return gdn_fail(GDN_E_OPTION, "cpu_list = \"%.64s\" needs place = GDN_PLACE_CPU_LIST", a->cpu_list);
  if (!a->cpu_list && a->place == GDN_PLACE_CPU_LIST) return gdn_fail(GDN_E_NULL, "cpu_list is null");
  if (a->numa_node && a->place != GDN_PLACE_NUMA_NODE)
    return gdn_fail(GDN_E_OPTION, "numa_node = %d needs place = GDN_PLACE_NUMA_NODE", a->numa_node);
  if (a->numa_node < 0) return gdn_fail(GDN_E_CPUS, "numa_node = %d: expected 0 or more", a->numa_node);
  return GDN_OK;
}

static atomic_int n_contexts;

int gdn_context_count(void) {
  return atomic_load(&n_contexts);
}

gdn_status gdn_context_make(const gdn_ctx_args *args, gdn_ctx **out) {
  gdn_ctx_args a = {0};
  gdn_status status = GDN_OK;
  if (args) status = gdn_check_struct(args, "args", sizeof a, &a, sizeof a);
  if (!status) status = check_args(&a);
  if (status) return status;
  gdn_ctx *ctx = gdn_mem_alloc(sizeof *ctx);
  if (!ctx) return gdn_fail(GDN_E_NOMEM, "no memory for a context");
  memset(ctx, 0, sizeof *ctx);
  atomic_fetch_add(&n_contexts, 1);
  ctx->pid = getpid();
  ctx->scratch_limit_bytes = a.scratch_limit_bytes ? a.scratch_limit_bytes : UINT64_MAX;
  pthread_mutex_init(&ctx->lock, NULL);
  gdn_cpu_detect(&ctx->cpu);
  status = choose_tier(ctx, a.isa);
  if (!status) status = start_workers(ctx, &a);
  if (status) {
    gdn_context_free(ctx);
    return status;
  }
  *out = ctx;
  return GDN_OK;
}

static void scratch_release(void *arg, int worker, int n_workers) {
  gdn_ctx *ctx = arg;
  (void)n_workers;
  gdn_scratch_release(&ctx->scratch[worker]);
}

void gdn_context_free(gdn_ctx *ctx) {
  if (ctx->team) {
    gdn_team_run(ctx->team, scratch_release, ctx);
    gdn_team_destroy(ctx->team);
  }
  gdn_topo_destroy(ctx->topo);
  for (int i = 0; i < GDN_N_DIMS * GDN_N_DIMS; i++) gdn_mem_free(ctx->gemms[i / GDN_N_DIMS][i % GDN_N_DIMS]);
  gdn_mem_free(ctx->row_set.keys);
  gdn_mem_free(ctx->row_set.seqs);
  gdn_plan_free(&ctx->plan);
  gdn_scratch_release(&ctx->shared);
  gdn_scratch_release(&ctx->slots_memory);
  gdn_mem_free(ctx->scratch);
  gdn_mem_free(ctx->shares);
  pthread_mutex_destroy(&ctx->lock);
  gdn_mem_free(ctx);
  atomic_fetch_sub(&n_contexts, 1);
}

/* ---- what calls need ---- */

struct reserve_job {
  gdn_ctx *ctx;
  size_t bytes;
  atomic_int failed;
};

static void scratch_reserve(void *arg, int worker, int n_workers) {
  struct reserve_job *job = arg;
  (void)n_workers;
  if (gdn_scratch_reserve(&job->ctx->scratch[worker], job->bytes)) atomic_store(&job->failed, 1);
}

gdn_status gdn_context_reserve(gdn_ctx *ctx, size_t bytes, size_t shared_bytes) {
  struct reserve_job job = {.ctx = ctx, .bytes = bytes};
  const uint64_t total = (uint64_t)bytes * (uint64_t)ctx->n_threads + shared_bytes;
  int enough = 1;
  if (total > ctx->scratch_limit_bytes)
    return gdn_fail(GDN_E_NOMEM, "the call needs %llu bytes of scratch: scratch_limit_bytes = %llu",
                    (unsigned long long)total, (unsigned long long)ctx->scratch_limit_bytes);
  if (shared_bytes && gdn_scratch_reserve(&ctx->shared, shared_bytes))
    return gdn_fail(GDN_E_NOMEM, "no memory for %zu bytes of scratch shared by the workers", shared_bytes);
  for (int i = 0; i < ctx->n_threads; i++) enough = enough && ctx->scratch[i].bytes >= bytes;
  if (enough) return GDN_OK;
  gdn_team_run(ctx->team, scratch_reserve, &job);
  if (atomic_load(&job.failed))
    return gdn_fail(GDN_E_NOMEM, "no memory for %zu bytes of scratch on each of %d workers", bytes, ctx->n_threads);
  return GDN_OK;
}

const struct gdn_gemms *gdn_context_gemms(gdn_ctx *ctx, int dim_k, int dim_v) {
  struct gdn_gemms **slot = &ctx->gemms[dim_k / 32 - 1][dim_v / 32 - 1];
  if (!*slot) {
    *slot = gdn_mem_alloc(sizeof **slot);
    if (*slot) gdn_gemms_make(*slot, dim_k, dim_v, gdn_tiers[ctx->tier].isa != GDN_ISA_REF);
  }
  return *slot;
}
