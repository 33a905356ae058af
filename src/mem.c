/* SPDX-License-Identifier: Apache-2.0
 * Aligned blocks, huge pages for large ones, and scratch that its owner grows. */
#define _GNU_SOURCE 1
#include "platform.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define HUGE_BYTES ((size_t)2 << 20)

/* Stands right before every block. A large block starts a huge page, so its header lies in a page of its own. */
struct header {
  void *base;
  size_t mapped_bytes; /* 0: base came from the heap */
};

static void *finish(char *block, void *base, size_t mapped_bytes) {
  struct header *header = (struct header *)(void *)(block - GDN_ALIGN_BYTES);
  header->base = base;
  header->mapped_bytes = mapped_bytes;
  return block;
}

static void *alloc_heap(size_t bytes) {
  bytes = (bytes + GDN_ALIGN_BYTES - 1) & ~(size_t)(GDN_ALIGN_BYTES - 1);
  char *base = aligned_alloc(GDN_ALIGN_BYTES, bytes + GDN_ALIGN_BYTES);
  return base ? finish(base + GDN_ALIGN_BYTES, base, 0) : NULL;
}

/* Mapped, not from the heap: a recycled heap block has pages where some earlier user touched them. */
static void *alloc_mapped(size_t bytes) {
  const size_t page_bytes = (size_t)sysconf(_SC_PAGESIZE);
  const size_t slack_bytes = HUGE_BYTES + page_bytes;
  if (bytes > SIZE_MAX - slack_bytes - page_bytes) return NULL;
  bytes = (bytes + page_bytes - 1) & ~(page_bytes - 1);
  char *map = mmap(NULL, bytes + slack_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (map == MAP_FAILED) return NULL;
  const uintptr_t first = (uintptr_t)map + page_bytes;
  char *block = map + page_bytes + (size_t)(-first & (HUGE_BYTES - 1));
  char *base = block - page_bytes;
  const size_t before_bytes = (size_t)(base - map);
  const size_t after_bytes = slack_bytes - page_bytes - before_bytes;
  if (before_bytes > 0) munmap(map, before_bytes);
  if (after_bytes > 0) munmap(block + bytes, after_bytes);
  madvise(block, bytes, MADV_HUGEPAGE); /* refused where the kernel has none: small pages serve as well */
  return finish(block, base, bytes + page_bytes);
}

void *gdn_mem_alloc(size_t bytes) {
  const int caller_errno = errno;
  void *block = bytes >= HUGE_BYTES ? alloc_mapped(bytes) : alloc_heap(bytes);
  errno = caller_errno;
  return block;
}

void gdn_mem_free(void *block) {
  if (!block) return;
  const int caller_errno = errno;
  const struct header header = *(struct header *)(void *)((char *)block - GDN_ALIGN_BYTES);
  if (header.mapped_bytes > 0)
    munmap(header.base, header.mapped_bytes);
  else
    free(header.base);
  errno = caller_errno;
}

int gdn_scratch_reserve(struct gdn_scratch *scratch, size_t bytes) {
  if (scratch->block && scratch->bytes >= bytes) return 0;
  gdn_scratch_release(scratch); /* before the new block, so that both are never held at once */
  const int caller_errno = errno;
  scratch->block = alloc_mapped(bytes);
  errno = caller_errno;
  if (!scratch->block) return ENOMEM;
  scratch->bytes = bytes;
  return 0;
}

void gdn_scratch_release(struct gdn_scratch *scratch) {
  gdn_mem_free(scratch->block);
  scratch->block = NULL;
  scratch->bytes = 0;
}
