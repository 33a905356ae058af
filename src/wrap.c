/* SPDX-License-Identifier: Apache-2.0
 * What libxsmm may not do to the process, for the shared library: the linker turns libxsmm's calls of f into calls of
 * __wrap_f (CMakeLists.txt). Seen in 1.17:
 *   putenv  adds OMP_PROC_BIND=TRUE to the environment: every program that the host starts later would bind its
 *           threads, and after dlclose the entry's memory is gone.
 *   open    makes a file /tmp/.libxsmm.<uid>, and keeps a descriptor of it open in the host and all its children, to
 *   see
 *           whether this is the first process of its kind.
 *   mmap    locks 11 MiB into memory, of which little is ever used; munmap gives each block back but for its last page.
 *   atexit  frees the code that workers run, who may be in the middle of it when the host leaves. */
#define _GNU_SOURCE 1
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/mman.h>

#include "engine.h"

int __wrap_putenv(char *entry);
int __wrap_open(const char *path, int flags, ...);
void *__wrap_mmap(void *address, size_t bytes, int protection, int flags, int fd, off_t offset);
int __wrap_munmap(void *address, size_t bytes);
int __wrap_atexit(void (*function)(void));
void *__real_mmap(void *address, size_t bytes, int protection, int flags, int fd, off_t offset);
int __real_munmap(void *address, size_t bytes);
int __real_atexit(void (*function)(void));

int __wrap_putenv(char *entry) {
  (void)entry;
  errno = ENOMEM;
  return -1;
}

int __wrap_open(const char *path, int flags, ...) {
  (void)path;
  (void)flags;
  errno = EACCES;
  return -1;
}

/* The blocks that were to be locked: libxsmm's registry and its buffers, four in all. */
enum { N_BLOCKS = 16 };

static struct {
  void *_Atomic address;
  size_t bytes;
} blocks[N_BLOCKS];

void *__wrap_mmap(void *address, size_t bytes, int protection, int flags, int fd, off_t offset) {
  void *block = __real_mmap(address, bytes, protection, flags & ~MAP_LOCKED, fd, offset);
  if (!(flags & MAP_LOCKED) || block == MAP_FAILED) return block;
  for (int i = 0; i < N_BLOCKS; i++) {
    void *none = NULL;
    if (!atomic_compare_exchange_strong(&blocks[i].address, &none, block)) continue;
    blocks[i].bytes = bytes;
    break;
  }
  return block;
}

int __wrap_munmap(void *address, size_t bytes) {
  for (int i = 0; i < N_BLOCKS; i++)
    if (atomic_load(&blocks[i].address) == address) {
      bytes = blocks[i].bytes;
      atomic_store(&blocks[i].address, NULL);
    }
  return __real_munmap(address, bytes);
}

static void (*end_of_libxsmm)(void);

static void end_if_unused(void) {
  if (gdn_context_count() == 0) end_of_libxsmm();
}

int __wrap_atexit(void (*function)(void)) {
  if (end_of_libxsmm) return __real_atexit(function);
  end_of_libxsmm = function;
  return __real_atexit(end_if_unused);
}
