/* SPDX-License-Identifier: Apache-2.0
 * Layer 0: processor, cores, threads, memory. Knows nothing of Gated DeltaNet.
 * Nothing here changes the calling thread's affinity, signal mask, floating-point control, OpenMP settings or errno,
 * except gdn_topo_bind_self, which is for workers. */
#ifndef GDN_PLATFORM_H
#define GDN_PLATFORM_H

#include <stddef.h>
#include <stdint.h>

/* ---- cpu.c: what processor and system offer together ---- */

enum {
  GDN_CPU_AVX2 = 1u << 0,       /* AVX2, FMA and F16C, YMM state enabled */
  GDN_CPU_AVX512 = 1u << 1,     /* F, BW, DQ, VL, ZMM state enabled; never without GDN_CPU_AVX2 */
  GDN_CPU_AVX512BF16 = 1u << 2, /* AVX512_BF16; never without GDN_CPU_AVX512 */
  GDN_CPU_AMX = 1u << 3 /* tiles of the size kernels expect, their bf16 products; never without GDN_CPU_AVX512BF16 */
};

struct gdn_cpu {
  uint32_t flags;      /* GDN_CPU_* that can be used */
  uint32_t features;   /* bit i: row i of the feature table in cpu.c is present */
  uint64_t xcr0;       /* register states that the operating system saves; 0 without XSAVE */
  int tile_errno;      /* why the kernel refused tile data to this process; 0 = granted or not asked for */
  int64_t cache_bytes; /* of the last-level cache; 0 = not known */
  char name[64];
};

void gdn_cpu_detect(struct gdn_cpu *cpu);
/* Why the flags of needed cannot all be used: "processor lacks avx512bw", "operating system does not save zmm
 * registers"; "" if they can. The first reason, lowest flag first. Returns text. */
const char *gdn_cpu_missing(const struct gdn_cpu *cpu, uint32_t needed, char *text, size_t text_bytes);

/* ---- topo.c: the cores this process may use; the only user of hwloc ---- */

/* A place: a set of cpus, and their processing units in the order in which workers take them, the first of every
 * physical core, then the second ones. */
struct gdn_topo;

#define GDN_ANY_NODE (-1)

/* The place of the calling thread's affinity mask (cpu_list null), or of a list such as "0-3,8", which the process's
 * cpuset bounds but not the mask; of either the cpus of numa_node unless that is GDN_ANY_NODE. Null and a reason when
 * there is no such place, null and "" when out of memory. Where hwloc sees nothing, every cpu counts as a core; without
 * a mask, there is one core that cannot be bound to. */
struct gdn_topo *gdn_topo_create(const char *cpu_list, int numa_node, char *reason, size_t reason_bytes);
void gdn_topo_destroy(struct gdn_topo *topo);
int gdn_topo_n_cores(const struct gdn_topo *topo);
/* Processing units, at least as many as cores. */
int gdn_topo_n_units(const struct gdn_topo *topo);
/* How many workers suit the process: the cores, or fewer where a cgroup's cpu quota pays for fewer. At least 1. */
int gdn_topo_n_workers(const struct gdn_topo *topo);
/* Binds the calling thread to unit i modulo the number of units; 0 on success, else errno. */
int gdn_topo_bind_self(const struct gdn_topo *topo, int i);
/* Lets the calling thread run on any cpu of the place; likewise. */
int gdn_topo_limit_self(const struct gdn_topo *topo);
/* The first n units as text, "0-3,8", whether bound or not. Cut with "..." where text is short. */
void gdn_topo_describe(const struct gdn_topo *topo, int n, char *text, size_t text_bytes);
/* What could not be learnt: "topology hidden, every cpu counts as a core"; "" if nothing. Static storage. */
const char *gdn_topo_note(const struct gdn_topo *topo);
/* Cores that the quota of the process's cgroup, version 1 or 2, or of one above it pays for, rounded up; 0 = no quota
 * to be seen. root is put before every path: "", but for tests. */
int gdn_topo_quota(const char *root);

/* ---- mem.c ---- */

#define GDN_ALIGN_BYTES 64
#define GDN_LINE_BYTES 64
/* Zero bytes give a valid block too; null when out of memory. Aligned to GDN_ALIGN_BYTES. Blocks of 2 MiB and more are
 * aligned to 2 MiB, may be backed by huge pages, and no page of theirs has been touched: the first writer places it. */
void *gdn_mem_alloc(size_t bytes);
void gdn_mem_free(void *block);

/* One worker's scratch, {0} at first. Only its owner reserves and uses it, so that its pages lie near the owner. */
struct gdn_scratch {
  void *block;
  size_t bytes;
};

/* Makes block hold at least bytes, of which none has been touched yet; contents are not preserved. 0, or ENOMEM and an
 * empty scratch. */
int gdn_scratch_reserve(struct gdn_scratch *scratch, size_t bytes);
void gdn_scratch_release(struct gdn_scratch *scratch);

/* ---- threads.c: a team of workers; holds the only OpenMP pragma ---- */

struct gdn_team;
typedef void (*gdn_team_fn)(void *arg, int worker, int n_workers);

/* What a caller's thread must find again after a call. */
struct gdn_caller {
  int error;      /* errno */
  unsigned mxcsr; /* rounding, exceptions and their flags, treatment of subnormals */
};

/* Saves it and puts the default floating-point control in its place. */
void gdn_caller_enter(struct gdn_caller *caller);
void gdn_caller_leave(const struct gdn_caller *caller);

/* Starts n workers in the place topo (null: that of the caller), with pin each bound to a unit of it. Bind errors leave
 * a worker unbound. topo is not used after the return. 0 on success, else nothing is left behind and the result says
 * why: EINVAL (n), ENOMEM, EAGAIN (the system gives no more threads), EPERM (OpenMP gives fewer than n, for example by
 * OMP_THREAD_LIMIT). */
int gdn_team_create(struct gdn_team **team, int n, const struct gdn_topo *topo, int pin);
/* Ends the workers; when it returns no thread runs code of this library on the team's behalf. Null is allowed. */
void gdn_team_destroy(struct gdn_team *team);
int gdn_team_size(const struct gdn_team *team);
/* How many workers are bound, and errno of a worker that could be neither bound nor limited as asked (0 if none);
 * bind_errno may be null. */
int gdn_team_n_bound(const struct gdn_team *team, int *bind_errno);
/* Runs fn on every worker once and returns when all are done. One caller at a time (the context's lock). What the
 * caller wrote before is seen by fn, and what fn wrote is seen after the return. */
void gdn_team_run(struct gdn_team *team, gdn_team_fn fn, void *arg);
/* Inside fn: returns when every worker of the running team has called it. */
void gdn_team_barrier(struct gdn_team *team);

#endif
