/* Prints JSON with very many checkpoints one by one. The output equals jansson's. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "cli/output/checkpoint_fields.h"
#include "cli/output/output.h"

#define PRECISION JSON_REAL_PRECISION(17)

typedef struct printer {
    char buffer[1 << 16];
    size_t used;
    int depth; /* nesting of the output, in steps of two columns */
    bool failed;
} printer;

static void flush(printer *p) {
    p->failed = p->failed || fwrite(p->buffer, 1, p->used, stdout) != p->used;
    p->used = 0;
}

static void put(printer *p, const char *text, size_t size) {
    while (size) {
        if (p->used == sizeof(p->buffer)) {
            flush(p);
        }
        size_t available = sizeof(p->buffer) - p->used, part = size < available ? size : available;
        memcpy(p->buffer + p->used, text, part);
        p->used += part;
        text += part;
        size -= part;
    }
}

static void put_text(printer *p, const char *text) {
    put(p, text, strlen(text));
}

static void put_line(printer *p) {
    put_text(p, "\n");
    for (int i = 0; i < p->depth; i++) {
        put_text(p, "  ");
    }
}

static void put_part(void *p, const char *text, size_t size) {
    put(p, text, size);
}

/* A json_dump_callback that indents lines. No string in the output contains a raw line end. */
static int put_dump(const char *text, size_t size, void *context) {
    printer *p = context;
    for (const char *end; size && (end = memchr(text, '\n', size)); text = end + 1) {
        cli_put_json(put_part, p, text, (size_t)(end - text));
        put_line(p);
        size -= (size_t)(end + 1 - text);
    }
    cli_put_json(put_part, p, text, size);
    return p->failed ? -1 : 0;
}

static void put_value(printer *p, const json_t *value) {
    int failed = json_dump_callback(value, put_dump, p, JSON_ENCODE_ANY | JSON_INDENT(2) | PRECISION);
    p->failed = p->failed || failed != 0;
}

static void put_made(printer *p, json_t *value) {
    put_value(p, value);
    json_decref(value);
}

static bool is_plain(const char *text) {
    for (; *text; text++) {
        if (*text < ' ' || *text > '~' || *text == '"' || *text == '\\') {
            return false;
        }
    }
    return true;
}

static void put_string(printer *p, const char *text) {
    if (is_plain(text)) {
        put_text(p, "\"");
        put_text(p, text);
        put_text(p, "\"");
    } else {
        put_made(p, cli_json_text(text));
    }
}

static void put_field(printer *p, const json_field *f) {
    char number[24];
    put_string(p, f->name);
    put_text(p, ": ");
    switch (f->kind) {
    case JSON_IS_TEXT:
        put_string(p, f->text);
        break;
    case JSON_IS_NUMBER:
        snprintf(number, sizeof(number), "%" PRId64, (int64_t)f->number);
        put_text(p, number);
        break;
    case JSON_IS_REAL:
        put_made(p, json_real(f->real));
        break;
    default:
        put_text(p, "null");
    }
}

static void put_checkpoint(printer *p, const ckd_checkpoint *c, const cli_ids *ids) {
    checkpoint_fields fields = {0};
    checkpoint_fields_make(&fields, c, ids);
    put_text(p, "{");
    p->depth++;
    for (size_t i = 0; i < CHECKPOINT_FIELDS; i++) {
        put_text(p, i ? "," : "");
        put_line(p);
        put_field(p, &fields.items[i]);
    }
    p->depth--;
    put_line(p);
    put_text(p, "}");
}

static void put_checkpoints(printer *p, const ckd_checkpoint_list *list, const cli_ids *ids) {
    put_text(p, "[");
    p->depth++;
    for (size_t i = 0; i < list->count && !p->failed; i++) {
        put_text(p, i ? "," : "");
        put_line(p);
        put_checkpoint(p, &list->items[i], ids);
    }
    p->depth--;
    if (list->count) {
        put_line(p);
    }
    put_text(p, "]");
}

static void put_root(printer *p, json_t *root, const char *key, const ckd_checkpoint_list *list,
                     const cli_ids *ids) {
    const char *name;
    json_t *value;
    bool first = true;
    put_text(p, "{");
    p->depth++;
    json_object_foreach(root, name, value) { /* in the order in which they were set */
        put_text(p, first ? "" : ",");
        put_line(p);
        put_string(p, name);
        put_text(p, ": ");
        if (strcmp(name, key) == 0) {
            put_checkpoints(p, list, ids);
        } else {
            put_value(p, value);
        }
        first = false;
    }
    p->depth--;
    put_line(p);
    put_text(p, "}\n");
    flush(p);
}

ckd_status cli_json_print_list(json_t *root, const char *key, const ckd_checkpoint_list *list,
                               const ckd_checkpoint_list *all, ckd_error *err) {
    cli_ids ids = {0};
    printer p = {.used = 0};
    if (!root) {
        return cli_error_nomem(err);
    }
    ckd_status status = cli_ids_make(&ids, all, err);
    if (status == CKD_OK) {
        put_root(&p, root, key, list, &ids);
        status = p.failed && !ferror(stdout) ? cli_error_nomem(err) : CKD_OK;
    }
    cli_ids_free(&ids);
    json_decref(root);
    return status;
}
