/* SPDX-License-Identifier: Apache-2.0
 * A server that forks a child for every request, and one that starts itself anew, both with a context alive in the
 * parent all the time. argv[1]: "request" in the program that was started anew. */
#define _POSIX_C_SOURCE 200809L
#include <gdn.h>

#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { dim = 32, n_requests = 12 };

static int serve(gdn_ctx *ctx, gdn_status want) {
  uint16_t qkv[dim] = {0}, out[dim] = {0};
  gdn_decode_args args = {0};
  qkv[0] = 0x3f80; /* 1.0 as bf16 */
  args.struct_size = sizeof args;
  args.n_seqs = args.n_heads_k = args.n_heads_v = 1;
  args.dim_k = args.dim_v = dim;
  args.scale = 1.0f;
  args.q.data = args.k.data = args.v.data = qkv;
  args.out.data = out;
  if (gdn_decode(ctx, &args) != want) return 1;
  return want ? out[0] != 0 : memcmp(out, qkv, sizeof out) != 0;
}

static int request(void) {
  gdn_ctx *ctx = NULL;
  alarm(20); /* a child that waits for its parent's workers hangs */
  if (gdn_ctx_create(NULL, &ctx)) return 10;
  if (serve(ctx, GDN_OK)) return 11;
  gdn_ctx_destroy(ctx);
  return 0;
}

int main(int argc, char **argv) {
  gdn_ctx *ctx = NULL;
  pid_t children[n_requests];
  int bad = 0;
  if (argc > 1 && !strcmp(argv[1], "request")) return request();
  if (gdn_ctx_create(NULL, &ctx) || serve(ctx, GDN_OK)) {
    fprintf(stderr, "%s\n", gdn_last_error());
    return 1;
  }
  for (int i = 0; i < n_requests; i++) {
    children[i] = fork();
    if (children[i] == 0 && i % 2) {
      execl("/proc/self/exe", argv[0], "request", (char *)NULL);
      _exit(12);
    }
    if (children[i] == 0) {
      alarm(20);
      _exit(serve(ctx, GDN_E_FORK) ? 13 : request());
    }
    bad += children[i] < 0 || serve(ctx, GDN_OK);
  }
  for (int i = 0; i < n_requests; i++) {
    int status = 0;
    if (waitpid(children[i], &status, 0) != children[i] || status != 0) {
      fprintf(stderr, "child %d: status %#x\n", i, (unsigned)status);
      bad++;
    }
  }
  bad += serve(ctx, GDN_OK);
  gdn_ctx_destroy(ctx);
  return bad != 0;
}
