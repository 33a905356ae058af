/* SPDX-License-Identifier: Apache-2.0
 * Reader of .npy files. Trusts nothing in the file: every size is checked against the file's own length before
 * anything of that size is allocated. */
#include "npy.h"

#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define NPY_ALIGN_BYTES 64
#define NPY_HEADER_MAX_BYTES 65536

static const struct {
  const char *descr;
  const char *name;
  size_t elem_bytes;
} types[] = {
    [NPY_U16] = {"<u2", "uint16", 2},
    [NPY_F32] = {"<f4", "float32", 4},
    [NPY_I32] = {"<i4", "int32", 4},
    [NPY_I64] = {"<i8", "int64", 8},
};

struct error_text {
  char *text;
  size_t bytes;
};

/* The header's dictionary while it is read. */
struct header {
  const char *at, *end;
  char descr[16];
  bool fortran_order;
  int64_t shape[NPY_DIMS_MAX];
  int n_dims;
  bool has_descr, has_order, has_shape;
};

__attribute__((format(printf, 2, 3))) static int fail(struct error_text e, const char *format, ...) {
  va_list args;
  va_start(args, format);
  vsnprintf(e.text, e.bytes, format, args);
  va_end(args);
  return -1;
}

const char *npy_type_name(enum npy_type type) {
  return types[type].name;
}

void npy_free(struct npy *a) {
  free(a->data);
  memset(a, 0, sizeof *a);
}

static void skip_blanks(struct header *h) {
  while (h->at < h->end && (*h->at == ' ' || *h->at == '\n' || *h->at == '\t' || *h->at == '\r')) {
    h->at++;
  }
}

static bool take_char(struct header *h, char c) {
  skip_blanks(h);
  if (h->at < h->end && *h->at == c) {
    h->at++;
    return true;
  }
  return false;
}

static bool take_word(struct header *h, const char *word) {
  size_t n = strlen(word);
  skip_blanks(h);
  if ((size_t)(h->end - h->at) < n || memcmp(h->at, word, n) != 0) {
    return false;
  }
  h->at += n;
  return true;
}

/* A quoted string without escapes, which is all that a header holds. */
static bool take_string(struct header *h, char *text, size_t text_bytes) {
  skip_blanks(h);
  if (h->at >= h->end || (*h->at != '\'' && *h->at != '"')) {
    return false;
  }
  const char *start = h->at + 1;
  const char *stop = memchr(start, *h->at, (size_t)(h->end - start));
  if (!stop || (size_t)(stop - start) >= text_bytes) {
    return false;
  }
  memcpy(text, start, (size_t)(stop - start));
  text[stop - start] = '\0';
  h->at = stop + 1;
  return true;
}

static bool take_count(struct header *h, int64_t *count) {
  skip_blanks(h);
  const char *start = h->at;
  int64_t value = 0;
  for (; h->at < h->end && *h->at >= '0' && *h->at <= '9'; h->at++) {
    int digit = *h->at - '0';
    if (value > (INT64_MAX - digit) / 10) {
      return false;
    }
    value = value * 10 + digit;
  }
  *count = value;
  return h->at > start;
}

static bool take_shape(struct header *h) {
  if (!take_char(h, '(')) {
    return false;
  }
  while (!take_char(h, ')')) {
    if (h->n_dims == NPY_DIMS_MAX || !take_count(h, &h->shape[h->n_dims])) {
      return false;
    }
    h->n_dims++;
    if (!take_char(h, ',')) {
      return take_char(h, ')');
    }
  }
  return true;
}

static int take_entry(struct header *h, struct error_text e) {
  char key[32];
  if (!take_string(h, key, sizeof key) || !take_char(h, ':')) {
    return fail(e, "header is not a dictionary of named entries");
  }
  if (strcmp(key, "descr") == 0 && !h->has_descr) {
    h->has_descr = true;
    return take_string(h, h->descr, sizeof h->descr) ? 0 : fail(e, "header: descr is not the name of one type");
  }
  if (strcmp(key, "fortran_order") == 0 && !h->has_order) {
    h->has_order = true;
    h->fortran_order = take_word(h, "True");
    return h->fortran_order || take_word(h, "False") ? 0 : fail(e, "header: fortran_order is neither True nor False");
  }
  if (strcmp(key, "shape") == 0 && !h->has_shape) {
    h->has_shape = true;
    return take_shape(h) ? 0 : fail(e, "header: shape is not a tuple of at most %d counts", NPY_DIMS_MAX);
  }
  return fail(e, "header: unknown or repeated entry \"%s\"", key);
}

static int parse_header(struct header *h, struct error_text e) {
  if (!take_char(h, '{')) {
    return fail(e, "header is not a dictionary");
  }
  while (!take_char(h, '}')) {
    if (take_entry(h, e) != 0) {
      return -1;
    }
    if (!take_char(h, ',')) {
      if (!take_char(h, '}')) {
        return fail(e, "header: entries are not separated by commas");
      }
      break;
    }
  }
  skip_blanks(h);
  if (h->at != h->end) {
    return fail(e, "header has text after its dictionary");
  }
  if (!h->has_descr || !h->has_order || !h->has_shape) {
    return fail(e, "header lacks descr, fortran_order or shape");
  }
  return 0;
}

/* Turns the header into type, shape and element count; data_bytes is what the file holds behind the header. */
static int check_header(const struct header *h, int64_t data_bytes, struct npy *a, struct error_text e) {
  size_t n_types = sizeof types / sizeof types[0];
  size_t type = 0;
  while (type < n_types && strcmp(types[type].descr, h->descr) != 0) {
    type++;
  }
  if (type == n_types) {
    return fail(e, "element type \"%s\" is not one of <u2, <f4, <i4, <i8", h->descr);
  }
  if (h->fortran_order) {
    return fail(e, "array is in Fortran order, expected C order");
  }
  bool empty = false;
  for (int i = 0; i < h->n_dims; i++) {
    empty = empty || h->shape[i] == 0;
  }
  int64_t n = empty ? 0 : 1;
  for (int i = 0; i < h->n_dims && !empty; i++) {
    if (n > INT64_MAX / 8 / h->shape[i]) {
      return fail(e, "shape holds too many elements");
    }
    n *= h->shape[i];
  }
  int64_t expected = n * (int64_t)types[type].elem_bytes;
  if (expected != data_bytes) {
    return fail(e, "shape and type need %lld bytes of data, the file has %lld", (long long)expected,
                (long long)data_bytes);
  }
  a->type = (enum npy_type)type;
  a->n_dims = h->n_dims;
  a->n_elems = n;
  memcpy(a->shape, h->shape, sizeof a->shape);
  return 0;
}

static int read_bytes(FILE *f, void *bytes, size_t n, const char *what, struct error_text e) {
  if (fread(bytes, 1, n, f) == n) {
    return 0;
  }
  return ferror(f) ? fail(e, "cannot read %s: %s", what, strerror(errno)) : fail(e, "file ends inside %s", what);
}

/* Magic, version and length of the header text; *prefix_bytes is where the text starts. */
static int read_prefix(FILE *f, size_t *prefix_bytes, size_t *header_bytes, struct error_text e) {
  unsigned char p[12];
  if (read_bytes(f, p, 8, "the magic bytes", e) != 0) {
    return -1;
  }
  if (memcmp(p, "\x93NUMPY", 6) != 0) {
    return fail(e, "not an .npy file: wrong magic bytes");
  }
  if ((p[6] != 1 && p[6] != 2) || p[7] != 0) {
    return fail(e, "format version %d.%d is not 1.0 or 2.0", p[6], p[7]);
  }
  size_t length_bytes = p[6] == 1 ? 2 : 4;
  if (read_bytes(f, p + 8, length_bytes, "the header length", e) != 0) {
    return -1;
  }
  uint32_t length = (uint32_t)p[8] | (uint32_t)p[9] << 8;
  if (length_bytes == 4) {
    length |= (uint32_t)p[10] << 16 | (uint32_t)p[11] << 24;
  }
  if (length > NPY_HEADER_MAX_BYTES) {
    return fail(e, "header of %lu bytes is longer than %d", (unsigned long)length, NPY_HEADER_MAX_BYTES);
  }
  *prefix_bytes = 8 + length_bytes;
  *header_bytes = length;
  return 0;
}

static int read_header(FILE *f, int64_t file_bytes, struct npy *a, struct error_text e) {
  size_t prefix_bytes = 0;
  size_t header_bytes = 0;
  if (read_prefix(f, &prefix_bytes, &header_bytes, e) != 0) {
    return -1;
  }
  char *text = malloc(header_bytes + 1);
  if (!text) {
    return fail(e, "out of memory for the header");
  }
  struct header h = {.at = text, .end = text + header_bytes};
  int rc = read_bytes(f, text, header_bytes, "the header", e);
  if (rc == 0) {
    rc = parse_header(&h, e);
  }
  if (rc == 0) {
    rc = check_header(&h, file_bytes - (int64_t)(prefix_bytes + header_bytes), a, e);
  }
  free(text);
  return rc;
}

static int read_data(FILE *f, struct npy *a, struct error_text e) {
  size_t bytes = (size_t)a->n_elems * types[a->type].elem_bytes;
  /* aligned_alloc wants a multiple of the alignment, and zero bytes may give null. */
  size_t block = (bytes / NPY_ALIGN_BYTES + 1) * NPY_ALIGN_BYTES;
  a->data = aligned_alloc(NPY_ALIGN_BYTES, block);
  if (!a->data) {
    return fail(e, "out of memory for %zu bytes of data", bytes);
  }
  return read_bytes(f, a->data, bytes, "the data", e);
}

int npy_load(const char *path, struct npy *a, char *error, size_t error_bytes) {
  struct error_text e = {error, error_bytes};
  memset(a, 0, sizeof *a);
  FILE *f = fopen(path, "rb");
  if (!f) {
    return fail(e, "cannot open: %s", strerror(errno));
  }
  struct stat st;
  int rc = 0;
  if (fstat(fileno(f), &st) != 0) {
    rc = fail(e, "cannot read: %s", strerror(errno));
  } else if (!S_ISREG(st.st_mode)) {
    rc = fail(e, "not a regular file");
  } else {
    rc = read_header(f, (int64_t)st.st_size, a, e);
  }
  if (rc == 0) {
    rc = read_data(f, a, e);
  }
  fclose(f);
  if (rc != 0) {
    npy_free(a);
  }
  return rc;
}
