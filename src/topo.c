/* SPDX-License-Identifier: Apache-2.0
 * The cores that a context may use, as hwloc, the affinity mask and the cgroup tell; the only user of hwloc.
 *
 * By default the calling thread's affinity mask decides what is allowed: the kernel keeps it inside the cgroup's
 * cpuset, and OpenMP runtimes and taskset use it the same way. hwloc only says which processing units share a core,
 * and which cores a NUMA node. hwloc loads its plugins (HWLOC_PLUGINS_PATH) while it looks, and lets go of them. */
#define _GNU_SOURCE 1
#include "platform.h"

#include <errno.h>
#include <fcntl.h>
#include <hwloc.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* As many processing units as Linux can be built for on x86-64. */
#define MAX_CPUS 8192
#define MAX_PATH_BYTES 1024

typedef cpu_set_t cpu_mask[MAX_CPUS / CPU_SETSIZE];

struct gdn_topo {
  int n_cores, n_units;
  int n_quota; /* cores that the cpu quota pays for; 0 = no quota */
  const char *note;
  cpu_mask mask; /* the place; empty: not known */
  int units[];   /* [n_units] processing units by number, the first of every core first; -1: cannot be bound to */
};

static int in_mask(int cpu, const cpu_set_t *mask) {
  return cpu >= 0 && cpu < MAX_CPUS && CPU_ISSET_S((size_t)cpu, sizeof(cpu_mask), mask);
}

static int first_in_mask(const cpu_set_t *mask) {
  for (int cpu = 0; cpu < MAX_CPUS; cpu++)
    if (in_mask(cpu, mask)) return cpu;
  return -1;
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

static void describe_mask(const cpu_set_t *mask, char *text, size_t text_bytes) {
  if (text_bytes == 0) return;
  *text = '\0';
  for (int first = 0; first < MAX_CPUS; first++) {
    if (!in_mask(first, mask)) continue;
    int last = first;
    while (in_mask(last + 1, mask)) last++;
    if (!append_range(text, text_bytes, first, last)) return;
    first = last;
  }
}

/* ---- a list of cpus as an argument ---- */

struct reason {
  char *text;
  size_t bytes;
};

/* A number at *at, which moves behind it; -1 if there is none, MAX_CPUS for any that is too large. */
static int parse_cpu(const char **at) {
  if (**at < '0' || **at > '9') return -1;
  int cpu = 0;
  for (; **at >= '0' && **at <= '9'; ++*at) cpu = cpu < MAX_CPUS ? cpu * 10 + (**at - '0') : MAX_CPUS;
  return cpu < MAX_CPUS ? cpu : MAX_CPUS;
}

/* 1, or 0 and a reason. */
static int parse_list(const char *list, cpu_set_t *mask, struct reason why) {
  memset(mask, 0, sizeof(cpu_mask));
  if (!*list) {
    snprintf(why.text, why.bytes, "names no cpu");
    return 0;
  }
  for (const char *at = list;; at++) {
    const char *item = at;
    const int first = parse_cpu(&at);
    int last = first;
    if (*at == '-') {
      at++;
      last = parse_cpu(&at);
    }
    if (first < 0 || last < 0 || (*at && *at != ',')) {
      snprintf(why.text, why.bytes, "expected numbers and ranges such as \"0-3,8\", found \"%.16s\"", item);
      return 0;
    }
    if (first > last || last == MAX_CPUS) {
      snprintf(why.text, why.bytes, "\"%.16s\" %s", item,
               first > last ? "is a range that runs backwards" : "is beyond the largest cpu number, 8191");
      return 0;
    }
    for (int cpu = first; cpu <= last; cpu++) CPU_SET_S((size_t)cpu, sizeof(cpu_mask), mask);
    if (!*at) return 1;
  }
}

struct trial {
  cpu_mask wanted, given;
  int error;
};

static void *try_mask(void *arg) {
  struct trial *trial = arg;
  if (sched_setaffinity(0, sizeof trial->wanted, trial->wanted) < 0 ||
      sched_getaffinity(0, sizeof trial->given, trial->given) < 0)
    trial->error = errno;
  return NULL;
}

/* Whether the process may use the cpus of mask. Only the kernel knows, and it tells by granting them, so a thread is
 * made that asks. A refusal to bind at all is no answer; then the machine's number of cpus is the only bound. */
static int list_is_allowed(const cpu_set_t *mask, struct reason why) {
  struct trial trial = {.error = 0};
  sigset_t all, before;
  pthread_t thread;
  memcpy(trial.wanted, mask, sizeof trial.wanted);
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int error = pthread_create(&thread, NULL, try_mask, &trial);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (error == 0) {
    pthread_join(thread, NULL);
    error = trial.error;
  }
  const int n_configured = (int)sysconf(_SC_NPROCESSORS_CONF);
  for (int cpu = 0; cpu < MAX_CPUS; cpu++) {
    if (!in_mask(cpu, mask)) continue;
    const int allowed = error == 0 ? in_mask(cpu, trial.given) : error == EINVAL ? 0 : cpu < n_configured;
    if (allowed) continue;
    snprintf(why.text, why.bytes, "cpu %d is not there, or not this process's to use", cpu);
    return 0;
  }
  return 1;
}

/* ---- hwloc ---- */

/* The allowed processing units of every core in hwloc's order, so that neighbours share caches; the first of every
 * core, then the second ones. Returns the number of cores. */
static int list_units(hwloc_topology_t topology, const cpu_set_t *mask, int *units, int *n_units) {
  const int n = hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_CORE);
  int n_cores = 0;
  for (int before = -1, turn = 0; *n_units > before; turn++) {
    before = *n_units;
    for (int i = 0; i < n && *n_units < MAX_CPUS; i++) {
      const hwloc_obj_t core = hwloc_get_obj_by_type(topology, HWLOC_OBJ_CORE, (unsigned)i);
      int skip = turn, cpu = hwloc_bitmap_first(core->cpuset);
      while (cpu >= 0 && (!in_mask(cpu, mask) || skip-- > 0)) cpu = hwloc_bitmap_next(core->cpuset, cpu);
      if (cpu >= 0) units[(*n_units)++] = cpu;
    }
    if (turn == 0) n_cores = *n_units;
  }
  return n_cores;
}

/* Takes the cpus from mask that are not of the node; 1, or 0 and a reason. */
static int keep_node(hwloc_topology_t topology, int numa_node, cpu_set_t *mask, struct reason why) {
  hwloc_obj_t node = NULL;
  while ((node = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_NUMANODE, node)) != NULL)
    if (node->os_index == (unsigned)numa_node) break;
  if (!node) {
    snprintf(why.text, why.bytes, "there is no such node, or none of it is this process's to use");
    return 0;
  }
  char cpus[64];
  describe_mask(mask, cpus, sizeof cpus);
  for (int cpu = 0; cpu < MAX_CPUS; cpu++)
    if (!hwloc_bitmap_isset(node->cpuset, (unsigned)cpu)) CPU_CLR_S((size_t)cpu, sizeof(cpu_mask), mask);
  if (first_in_mask(mask) >= 0) return 1;
  snprintf(why.text, why.bytes, "none of its cpus is among those of the affinity mask, %s", cpus);
  return 0;
}

static int knows_all(hwloc_topology_t topology, const cpu_set_t *mask) {
  const int n = hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_CORE);
  int n_known = 0;
  for (int i = 0; i < n; i++) {
    const hwloc_obj_t core = hwloc_get_obj_by_type(topology, HWLOC_OBJ_CORE, (unsigned)i);
    for (int cpu = hwloc_bitmap_first(core->cpuset); cpu >= 0; cpu = hwloc_bitmap_next(core->cpuset, cpu))
      n_known += in_mask(cpu, mask);
  }
  return n_known == CPU_COUNT_S(sizeof(cpu_mask), mask);
}

/* Null where hwloc does not know all cpus of mask: it describes another machine (HWLOC_XMLFILE, HWLOC_SYNTHETIC), or
 * sees little of this one. Without sysfs it would print a complaint and make up one core, so it is not asked. */
static hwloc_topology_t load_hwloc(const cpu_set_t *mask) {
  hwloc_topology_t topology;
  if (access("/sys/devices/system/cpu/cpu0/topology", R_OK | X_OK) < 0) return NULL;
  if (hwloc_topology_init(&topology) < 0) return NULL;
  /* Cores only, nodes are always there: 2.0 ms against 2.6 ms with all types and 3.3 ms with I/O devices (2 cores,
   * hwloc 2.9). The default may bind the calling thread to one processing unit after the other while it reads CPUID. */
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
  if (hwloc_topology_load(topology) == 0 && hwloc_topology_is_thissystem(topology) && knows_all(topology, mask))
    return topology;
  hwloc_topology_destroy(topology);
  return NULL;
}

/* ---- quota ---- */

/* 1 and the start of the file as a string, or 0. */
static int read_text(const char *path, char *text, size_t text_bytes) {
  const int fd = openat(AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  const ssize_t n = read(fd, text, text_bytes - 1);
  close(fd);
  if (n <= 0) return 0;
  text[n] = '\0';
  return 1;
}

static int quota_of(const char *dir, int version) {
  char path[4 * MAX_PATH_BYTES], text[64];
  long long quota_us = 0, period_us = 0;
  if (version == 2) {
    snprintf(path, sizeof path, "%s/cpu.max", dir);
    if (!read_text(path, text, sizeof text) || sscanf(text, "%lld %lld", &quota_us, &period_us) != 2) return 0;
  } else {
    snprintf(path, sizeof path, "%s/cpu.cfs_quota_us", dir);
    if (!read_text(path, text, sizeof text) || sscanf(text, "%lld", &quota_us) != 1) return 0;
    snprintf(path, sizeof path, "%s/cpu.cfs_period_us", dir);
    if (!read_text(path, text, sizeof text) || sscanf(text, "%lld", &period_us) != 1) return 0;
  }
  if (quota_us <= 0 || period_us <= 0) return 0;
  const long long n = (quota_us + period_us - 1) / period_us;
  return n < MAX_CPUS ? (int)n : MAX_CPUS;
}

static int has_word(const char *list, const char *word) {
  const size_t len = strlen(word);
  for (const char *at = list; at; at = strchr(at, ',')) {
    at += *at == ',';
    if (!strncmp(at, word, len) && (at[len] == '\0' || at[len] == ',')) return 1;
  }
  return 0;
}

/* The process's directory in the hierarchy that rules cpu time: "id:controllers:dir" lines, version 2 without either.
 * */
static int find_group(FILE *file, int version, char *dir, size_t dir_bytes) {
  static const char format[] = "%*d:%255[^:\n]:%1023[^\n]";
  char line[MAX_PATH_BYTES + 300], controllers[256], path[MAX_PATH_BYTES];
  while (fgets(line, sizeof line, file)) {
    if (version == 2 && sscanf(line, "0::%1023[^\n]", path) == 1) {
      snprintf(dir, dir_bytes, "%s", path);
      return 1;
    }
    if (version == 1 && sscanf(line, format, controllers, path) == 2 && has_word(controllers, "cpu")) {
      snprintf(dir, dir_bytes, "%s", path);
      return 1;
    }
  }
  return 0;
}

/* Where that hierarchy is mounted, and which of its directories is seen there. */
static int find_mount(FILE *file, int version, char *top, char *point) {
  char line[4 * MAX_PATH_BYTES], type[64], options[512];
  while (fgets(line, sizeof line, file)) {
    const char *rest = strstr(line, " - ");
    if (!rest || sscanf(line, "%*s %*s %*s %1023s %1023s", top, point) != 2) continue;
    if (sscanf(rest, " - %63s %*s %511s", type, options) != 2) continue;
    if (version == 2 ? !strcmp(type, "cgroup2") : !strcmp(type, "cgroup") && has_word(options, "cpu")) return 1;
  }
  return 0;
}

static FILE *open_below(const char *root, const char *path) {
  char full[MAX_PATH_BYTES + 64];
  snprintf(full, sizeof full, "%s%s", root, path);
  return fopen(full, "re");
}

/* The smallest quota on the way from the process's cgroup up to what is mounted. */
static int read_quota(const char *root, int version) {
  char dir[MAX_PATH_BYTES], top[MAX_PATH_BYTES], point[MAX_PATH_BYTES], path[3 * MAX_PATH_BYTES];
  FILE *groups = open_below(root, "/proc/self/cgroup"), *mounts = open_below(root, "/proc/self/mountinfo");
  const int found =
      groups && mounts && find_group(groups, version, dir, sizeof dir) && find_mount(mounts, version, top, point);
  if (groups) fclose(groups);
  if (mounts) fclose(mounts);
  if (!found) return 0;
  /* In a container the mount often shows only the container's own directory, whose name outside dir still tells. */
  const size_t top_len = strcmp(top, "/") ? strlen(top) : 0;
  const char *below = strncmp(dir, top, top_len) ? "" : dir + top_len;
  const size_t stop = strlen(root) + strlen(point);
  snprintf(path, sizeof path, "%s%s%s", root, point, strcmp(below, "/") ? below : "");
  for (int least = 0;;) {
    const int n = quota_of(path, version);
    if (n > 0 && (least == 0 || n < least)) least = n;
    char *slash = strrchr(path, '/');
    if (!slash || (size_t)(slash - path) < stop) return least;
    *slash = '\0';
  }
}

int gdn_topo_quota(const char *root) {
  const int v1 = read_quota(root, 1), v2 = read_quota(root, 2);
  return v1 > 0 && (v2 == 0 || v1 < v2) ? v1 : v2;
}

/* ---- the place ---- */

/* The mask of the place before the node is looked at; 1, or 0 and a reason. *known: whether there is a mask. */
static int start_mask(const char *cpu_list, cpu_set_t *mask, int *known, struct reason why) {
  memset(mask, 0, sizeof(cpu_mask));
  *known = 1;
  if (cpu_list) return parse_list(cpu_list, mask, why) && list_is_allowed(mask, why);
  *known = sched_getaffinity(0, sizeof(cpu_mask), mask) == 0;
  return 1;
}

static int fill_units(struct gdn_topo *topo, int mask_known, int numa_node, struct reason why) {
  if (!mask_known) {
    topo->note = "affinity mask hidden, one core assumed";
    topo->units[topo->n_units++] = -1;
    topo->n_cores = 1;
    return numa_node == GDN_ANY_NODE;
  }
  hwloc_topology_t topology = load_hwloc(topo->mask);
  int kept = 1;
  if (topology) {
    kept = numa_node == GDN_ANY_NODE || keep_node(topology, numa_node, topo->mask, why);
    if (kept) topo->n_cores = list_units(topology, topo->mask, topo->units, &topo->n_units);
    hwloc_topology_destroy(topology);
  } else if (numa_node != GDN_ANY_NODE) {
    snprintf(why.text, why.bytes, "the topology is hidden, so nodes are not known");
    return 0;
  }
  if (!kept || topo->n_cores > 0) return kept;
  topo->note = "topology hidden, every cpu counts as a core";
  for (int cpu = 0; cpu < MAX_CPUS; cpu++)
    if (in_mask(cpu, topo->mask)) topo->units[topo->n_units++] = cpu;
  topo->n_cores = topo->n_units;
  return 1;
}

struct gdn_topo *gdn_topo_create(const char *cpu_list, int numa_node, char *reason, size_t reason_bytes) {
  const int caller_errno = errno;
  const struct reason why = {reason, reason_bytes};
  int mask_known = 0;
  *reason = '\0';
  struct gdn_topo *topo = calloc(1, sizeof *topo + MAX_CPUS * sizeof *topo->units);
  if (topo) {
    topo->note = "";
    if (start_mask(cpu_list, topo->mask, &mask_known, why) && fill_units(topo, mask_known, numa_node, why)) {
      topo->n_quota = gdn_topo_quota("");
      struct gdn_topo *fit = realloc(topo, sizeof *topo + (size_t)topo->n_units * sizeof *topo->units);
      if (fit) topo = fit;
    } else {
      if (!*reason) snprintf(reason, reason_bytes, "the affinity mask is hidden, so nodes cannot be used");
      free(topo);
      topo = NULL;
    }
  }
  errno = caller_errno;
  return topo;
}

void gdn_topo_destroy(struct gdn_topo *topo) {
  free(topo);
}

int gdn_topo_n_cores(const struct gdn_topo *topo) {
  return topo->n_cores;
}

int gdn_topo_n_units(const struct gdn_topo *topo) {
  return topo->n_units;
}

int gdn_topo_n_workers(const struct gdn_topo *topo) {
  return topo->n_quota > 0 && topo->n_quota < topo->n_cores ? topo->n_quota : topo->n_cores;
}

int gdn_topo_bind_self(const struct gdn_topo *topo, int i) {
  const int cpu = topo->units[i % topo->n_units];
  if (cpu < 0) return ENOSYS;
  cpu_mask mask;
  memset(mask, 0, sizeof mask);
  CPU_SET_S((size_t)cpu, sizeof mask, mask);
  return sched_setaffinity(0, sizeof mask, mask) < 0 ? errno : 0;
}

int gdn_topo_limit_self(const struct gdn_topo *topo) {
  if (topo->units[0] < 0) return ENOSYS;
  return sched_setaffinity(0, sizeof topo->mask, topo->mask) < 0 ? errno : 0;
}

const char *gdn_topo_note(const struct gdn_topo *topo) {
  return topo->note;
}

void gdn_topo_describe(const struct gdn_topo *topo, int n, char *text, size_t text_bytes) {
  cpu_mask mask;
  memset(mask, 0, sizeof mask);
  for (int i = 0; i < n && i < topo->n_units; i++)
    if (topo->units[i] >= 0) CPU_SET_S((size_t)topo->units[i], sizeof mask, mask);
  describe_mask(mask, text, text_bytes);
}
