/* SPDX-License-Identifier: Apache-2.0
 * An engine that loads libgdn at run time, without linking it. argv[1]: the shared object. */
#include <gdn.h>

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

/* ISO C has no cast from an object pointer to a function pointer. */
#define LOAD(library, name)                                                                                            \
  do {                                                                                                                 \
    void *symbol = dlsym(library, #name);                                                                              \
    memcpy(&name##_loaded, &symbol, sizeof symbol);                                                                    \
    if (!symbol) {                                                                                                     \
      fprintf(stderr, "no " #name ": %s\n", dlerror());                                                                \
      return 1;                                                                                                        \
    }                                                                                                                  \
  } while (0)

int main(int argc, char **argv) {
  enum { dim = 32 };
  uint16_t qkv[dim] = {0}, out[dim] = {0};
  float state[dim * dim];
  gdn_decode_args args = {0};
  gdn_ctx *ctx = NULL;
  uint32_t (*gdn_version_loaded)(void);
  gdn_status (*gdn_ctx_create_loaded)(const gdn_ctx_args *, gdn_ctx **);
  void (*gdn_ctx_destroy_loaded)(gdn_ctx *);
  gdn_status (*gdn_decode_loaded)(gdn_ctx *, const gdn_decode_args *);
  void *library = dlopen(argc > 1 ? argv[1] : "libgdn.so.0", RTLD_NOW | RTLD_LOCAL);

  if (!library) {
    fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  LOAD(library, gdn_version);
  LOAD(library, gdn_ctx_create);
  LOAD(library, gdn_ctx_destroy);
  LOAD(library, gdn_decode);

  /* q = k = v = the first unit vector: the state becomes k v^T and the output v. */
  qkv[0] = 0x3f80; /* 1.0 as bf16 */
  args.struct_size = sizeof args;
  args.n_seqs = 1;
  args.n_heads_k = args.n_heads_v = 1;
  args.dim_k = args.dim_v = dim;
  args.scale = 1.0f;
  args.q.data = args.k.data = args.v.data = qkv;
  args.out.data = out;
  args.final_state.data = state;
  args.final_state.n_rows = 1;
  if (gdn_version_loaded() != GDN_VERSION || gdn_ctx_create_loaded(NULL, &ctx) || gdn_decode_loaded(ctx, &args)) {
    fprintf(stderr, "a call failed\n");
    return 1;
  }
  gdn_ctx_destroy_loaded(ctx);
  if (memcmp(out, qkv, sizeof out) != 0 || state[0] != 1.0f || state[1] != 0.0f) {
    fprintf(stderr, "wrong result\n");
    return 1;
  }
  return dlclose(library) != 0;
}
