/* SPDX-License-Identifier: Apache-2.0
 * The cores that the process may use, as hwloc, the affinity mask and the cgroup tell; the only user of hwloc.
 *
 * The calling thread's affinity mask decides what is allowed: the kernel keeps it inside the cgroup's cpuset, and
 * OpenMP runtimes and taskset use it the same way. hwloc only says which processing units share a core. */
#define _GNU_SOURCE 1
#include "platform.h"

#include <errno.h>
#include <fcntl.h>
#include <hwloc.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* As many processing units as Linux can be built for on x86-64. */
#define MAX_CPUS 8192

typedef cpu_set_t cpu_mask[MAX_CPUS / CPU_SETSIZE];

struct gdn_topo {
  int n_cores;
  int n_quota; /* cores that the cpu quota pays for; 0 = no quota */
  const char *note;
  int cpus[]; /* [n_cores] one processing unit per core, by number; -1: cannot be bound to */
};

static int in_mask(int cpu, const cpu_set_t *mask) {
  return cpu >= 0 && cpu < MAX_CPUS && CPU_ISSET_S((size_t)cpu, sizeof(cpu_mask), mask);
}

/* The first allowed processing unit of every core, in hwloc's order, so that neighbours share caches. 0 where hwloc
 * describes another machine (HWLOC_XMLFILE), has no cores (hidden /sys), or knows none that is allowed. */
static int list_cores(hwloc_topology_t topology, const cpu_set_t *mask, int *cpus) {
  if (!hwloc_topology_is_thissystem(topology)) return 0;
  const int n = hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_CORE);
  int n_cores = 0;
  for (int i = 0; i < n && n_cores < MAX_CPUS; i++) {
    const hwloc_obj_t core = hwloc_get_obj_by_type(topology, HWLOC_OBJ_CORE, (unsigned)i);
    if (!core) continue;
    int cpu = hwloc_bitmap_first(core->cpuset);
    while (cpu >= 0 && !in_mask(cpu, mask)) cpu = hwloc_bitmap_next(core->cpuset, cpu);
    if (cpu >= 0) cpus[n_cores++] = cpu;
  }
  return n_cores;
}

static int ask_hwloc(const cpu_set_t *mask, int *cpus) {
  hwloc_topology_t topology;
  if (hwloc_topology_init(&topology) < 0) return 0;
  /* Cores only: 2.0 ms against 2.6 ms with all types and 3.3 ms with I/O devices (2 cores, hwloc 2.9). The default
   * may bind the calling thread to one processing unit after the other while it reads CPUID. */
  hwloc_topology_set_all_types_filter(topology, HWLOC_TYPE_FILTER_KEEP_NONE);
  hwloc_topology_set_type_filter(topology, HWLOC_OBJ_CORE, HWLOC_TYPE_FILTER_KEEP_ALL);
  unsigned long flags = 0;
#if HWLOC_API_VERSION >= 0x00020500
  flags |= HWLOC_TOPOLOGY_FLAG_DONT_CHANGE_BINDING;
#endif
#if HWLOC_API_VERSION >= 0x00020800
  flags |= HWLOC_TOPOLOGY_FLAG_NO_DISTANCES | HWLOC_TOPOLOGY_FLAG_NO_MEMATTRS | HWLOC_TOPOLOGY_FLAG_NO_CPUKINDS;
#endif
  hwloc_topology_set_flags(topology, flags);
  const int n_cores = hwloc_topology_load(topology) < 0 ? 0 : list_cores(topology, mask, cpus);
  hwloc_topology_destroy(topology);
  return n_cores;
}

/* 1 and the start of the file as a string, or 0. */
static int read_text(const char *path, char *text, size_t text_bytes) {
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  const ssize_t n = read(fd, text, text_bytes - 1);
  close(fd);
  if (n <= 0) return 0;
  text[n] = '\0';
  return 1;
}

/* Cores that the quota of one cgroup version 2 directory pays for, rounded up; 0 = no quota. */
static int quota_of(const char *dir) {
  char path[4096 + 64], text[64];
  long long quota_us, period_us;
  snprintf(path, sizeof path, "/sys/fs/cgroup%s/cpu.max", dir);
  if (!read_text(path, text, sizeof text)) return 0;
  if (sscanf(text, "%lld %lld", &quota_us, &period_us) != 2 || quota_us <= 0 || period_us <= 0) return 0;
  const long long n = (quota_us + period_us - 1) / period_us;
  return n < MAX_CPUS ? (int)n : MAX_CPUS;
}

/* The smallest quota on the way from the process's cgroup up to the root; 0 = none, or not to be seen. */
static int read_quota(void) {
  char text[4096];
  if (!read_text("/proc/self/cgroup", text, sizeof text)) return 0;
  char *dir = strncmp(text, "0::", 3) ? strstr(text, "\n0::") : text;
  if (!dir) return 0;
  dir = strchr(dir, '/');
  if (!dir) return 0;
  dir[strcspn(dir, "\n")] = '\0';
  int least = 0;
  for (;;) {
    if (!strcmp(dir, "/")) *dir = '\0';
    const int n = quota_of(dir);
    if (n > 0 && (least == 0 || n < least)) least = n;
    char *slash = strrchr(dir, '/');
    if (!slash) return least;
    *slash = '\0';
  }
}

static int list_cpus(const cpu_set_t *mask, int *cpus) {
  int n = 0;
  for (int cpu = 0; cpu < MAX_CPUS; cpu++)
    if (in_mask(cpu, mask)) cpus[n++] = cpu;
  return n;
}

struct gdn_topo *gdn_topo_create(void) {
  const int caller_errno = errno;
  cpu_mask mask;
  int n_cores = 0;
  const char *note = "";
  struct gdn_topo *topo = malloc(sizeof *topo + MAX_CPUS * sizeof *topo->cpus);
  if (!topo) goto done;
  memset(mask, 0, sizeof mask);
  if (sched_getaffinity(0, sizeof mask, mask) < 0) {
    note = "affinity mask hidden, one core assumed";
    topo->cpus[n_cores++] = -1;
  } else if ((n_cores = ask_hwloc(mask, topo->cpus)) == 0) {
    note = "topology hidden, every cpu counts as a core";
    n_cores = list_cpus(mask, topo->cpus);
  }
  struct gdn_topo *fit = realloc(topo, sizeof *topo + (size_t)n_cores * sizeof *topo->cpus);
  if (fit) topo = fit;
  topo->n_cores = n_cores;
  topo->n_quota = read_quota();
  topo->note = note;
done:
  errno = caller_errno;
  return topo;
}

void gdn_topo_destroy(struct gdn_topo *topo) {
  free(topo);
}

int gdn_topo_n_cores(const struct gdn_topo *topo) {
  return topo->n_cores;
}

int gdn_topo_n_workers(const struct gdn_topo *topo) {
  return topo->n_quota > 0 && topo->n_quota < topo->n_cores ? topo->n_quota : topo->n_cores;
}

int gdn_topo_bind_self(const struct gdn_topo *topo, int i) {
  const int cpu = topo->cpus[i % topo->n_cores];
  if (cpu < 0) return ENOSYS;
  cpu_mask mask;
  memset(mask, 0, sizeof mask);
  CPU_SET_S((size_t)cpu, sizeof mask, mask);
  return sched_setaffinity(0, sizeof mask, mask) < 0 ? errno : 0;
}

const char *gdn_topo_note(const struct gdn_topo *topo) {
  return topo->note;
}

/* Appends "first" or "first-last"; 0 if it does not fit beside an ending of "...". */
static int append_range(char *text, size_t text_bytes, int first, int last) {
  const size_t len = strlen(text);
  char range[32];
  if (first == last)
    snprintf(range, sizeof range, "%s%d", len > 0 ? "," : "", first);
  else
    snprintf(range, sizeof range, "%s%d-%d", len > 0 ? "," : "", first, last);
  if (len + strlen(range) + sizeof "..." > text_bytes) {
    snprintf(text + len, text_bytes - len, "...");
    return 0;
  }
  strcpy(text + len, range);
  return 1;
}

void gdn_topo_describe(const struct gdn_topo *topo, char *text, size_t text_bytes) {
  if (text_bytes == 0) return;
  *text = '\0';
  cpu_mask mask;
  memset(mask, 0, sizeof mask);
  for (int i = 0; i < topo->n_cores; i++)
    if (topo->cpus[i] >= 0) CPU_SET_S((size_t)topo->cpus[i], sizeof mask, mask);
  for (int first = 0; first < MAX_CPUS; first++) {
    if (!in_mask(first, mask)) continue;
    int last = first;
    while (in_mask(last + 1, mask)) last++;
    if (!append_range(text, text_bytes, first, last)) return;
    first = last;
  }
}
