/* SPDX-License-Identifier: Apache-2.0
 * JSON writer and table printer. */
#include "report.h"

#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

/* ---- JSON ---- */

/* Bytes of the UTF-8 sequence at s, 0 if it is not a valid one. */
static int utf8_bytes(const unsigned char *s) {
  int n = s[0] < 0x80                   ? 1
          : s[0] >= 0xC2 && s[0] < 0xE0 ? 2
          : (s[0] & 0xF0) == 0xE0       ? 3
          : s[0] >= 0xF0 && s[0] < 0xF5 ? 4
                                        : 0;
  for (int i = 1; i < n; i++) {
    if ((s[i] & 0xC0) != 0x80) {
      return 0;
    }
  }
  bool overlong = (s[0] == 0xE0 && s[1] < 0xA0) || (s[0] == 0xF0 && s[1] < 0x90);
  bool no_character = (s[0] == 0xED && s[1] >= 0xA0) || (s[0] == 0xF4 && s[1] >= 0x90);
  return n > 1 && (overlong || no_character) ? 0 : n;
}

static void write_quoted(FILE *f, const char *text) {
  fputc('"', f);
  for (const unsigned char *s = (const unsigned char *)text; *s;) {
    int n = utf8_bytes(s);
    if (n == 0) {
      fputs("\\ufffd", f);
      n = 1;
    } else if (*s == '"' || *s == '\\') {
      fprintf(f, "\\%c", *s);
    } else if (*s < 0x20 || *s == 0x7F) {
      fprintf(f, "\\u%04x", *s);
    } else {
      fwrite(s, 1, (size_t)n, f);
    }
    s += n;
  }
  fputc('"', f);
}

static void write_key(struct json *j, const char *key) {
  if (j->depth > 0) {
    fprintf(j->file, "%s\n%*s", j->empty ? "" : ",", 2 * j->depth, "");
  }
  if (key) {
    write_quoted(j->file, key);
    fputs(": ", j->file);
  }
  j->empty = false;
}

static void begin(struct json *j, const char *key, char bracket) {
  write_key(j, key);
  fputc(bracket, j->file);
  j->depth++;
  j->empty = true;
}

static void end(struct json *j, char bracket) {
  j->depth--;
  if (!j->empty) {
    fprintf(j->file, "\n%*s", 2 * j->depth, "");
  }
  fputc(bracket, j->file);
  j->empty = false;
  if (j->depth == 0) {
    fputc('\n', j->file);
  }
}

void json_begin_object(struct json *j, const char *key) {
  begin(j, key, '{');
}

void json_end_object(struct json *j) {
  end(j, '}');
}

void json_begin_array(struct json *j, const char *key) {
  begin(j, key, '[');
}

void json_end_array(struct json *j) {
  end(j, ']');
}

void json_string(struct json *j, const char *key, const char *text) {
  write_key(j, key);
  write_quoted(j->file, text ? text : "");
}

void json_int(struct json *j, const char *key, int64_t value) {
  write_key(j, key);
  fprintf(j->file, "%lld", (long long)value);
}

void json_number(struct json *j, const char *key, double value) {
  write_key(j, key);
  if (isfinite(value)) {
    fprintf(j->file, "%.9g", value);
  } else {
    fputs("null", j->file);
  }
}

void json_bool(struct json *j, const char *key, bool value) {
  write_key(j, key);
  fputs(value ? "true" : "false", j->file);
}

void json_null(struct json *j, const char *key) {
  write_key(j, key);
  fputs("null", j->file);
}

/* ---- tables ---- */

void table_begin(struct table *t, int n_columns, const char *const *headers) {
  memset(t, 0, sizeof *t);
  t->n_columns = n_columns;
  for (int i = 0; i < n_columns; i++) {
    table_cell(t, "%s", headers[i]);
  }
}

void table_cell(struct table *t, const char *format, ...) {
  if (t->n_cells == t->n_cells_max) {
    int n_max = t->n_cells_max ? 2 * t->n_cells_max : 64;
    void *cells = realloc(t->cells, (size_t)n_max * TABLE_CELL_BYTES);
    if (!cells) {
      t->out_of_memory = true;
      return;
    }
    t->cells = cells;
    t->n_cells_max = n_max;
  }
  va_list args;
  va_start(args, format);
  vsnprintf(t->cells[t->n_cells++], TABLE_CELL_BYTES, format, args);
  va_end(args);
}

bool table_end(struct table *t, FILE *file) {
  int widths[TABLE_COLUMNS_MAX] = {0};
  for (int i = 0; i < t->n_cells; i++) {
    int width = (int)strlen(t->cells[i]);
    int *column = &widths[i % t->n_columns];
    *column = width > *column ? width : *column;
  }
  for (int i = 0; i < t->n_cells; i++) {
    int column = i % t->n_columns;
    int width = column == 0 ? -widths[0] : widths[column];
    fprintf(file, "%*s%s", width, t->cells[i], column == t->n_columns - 1 ? "\n" : "  ");
  }
  free(t->cells);
  t->cells = NULL;
  return !t->out_of_memory;
}

void report_line(const char *name, const char *format, ...) {
  va_list args;
  printf("%-22s ", name);
  va_start(args, format);
  vprintf(format, args);
  va_end(args);
  putchar('\n');
}

const char *report_grouped(int64_t value, char *text) {
  char digits[24];
  int n = snprintf(digits, sizeof digits, "%lld", (long long)value);
  char *to = text;
  for (int i = 0; i < n; i++) {
    if (i > 0 && (n - i) % 3 == 0 && digits[i - 1] != '-') {
      *to++ = ' ';
    }
    *to++ = digits[i];
  }
  *to = '\0';
  return text;
}
