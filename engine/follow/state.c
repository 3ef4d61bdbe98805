/*
 * The folder's state and its journal. Both are the same small JSON text. The journal is the state that the folder is
 * about to have.
 */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "engine/follow/follow.h"

#define STATE_BYTES_MAX ((size_t)64 << 20)

follow_path follow_path_of(const char *folder, const char *name) {
    follow_path p;
    snprintf(p.text, sizeof(p.text), "%s/%s", folder, name);
    return p;
}

follow_path follow_path_new(const char *folder, const char *name) {
    follow_path p;
    snprintf(p.text, sizeof(p.text), "%s/.%s" FOLLOW_NEW, folder, name);
    return p;
}

void follow_state_free(follow_state *s) {
    free(s->files);
    *s = (follow_state){0};
}

const follow_file *follow_state_find(const follow_state *s, const char *name) {
    for (size_t i = 0; i < s->count; i++) {
        if (strcmp(s->files[i].name, name) == 0) {
            return &s->files[i];
        }
    }
    return NULL;
}

ckd_status follow_state_keep(follow_state *s, const follow_file *file, ckd_error *err) {
    ckd_status status = ARRAY_GROW(s->files, s->capacity, s->count + 1, "a folder's files", err);
    if (status == CKD_OK) {
        s->files[s->count++] = *file;
    }
    return status;
}

ckd_status follow_state_add(follow_state *s, const char *name, const char *path, const hash128 *header,
                            ckd_error *err) {
    follow_file f = {.size = file_bytes(path),
                     .modified_ns = file_modified_ns(path),
                     .inode = file_inode(path),
                     .header = *header};
    snprintf(f.name, sizeof(f.name), "%s", name);
    return f.inode ? follow_state_keep(s, &f, err)
                   : err_set(err, CKD_E_NOT_FOUND, "%s has disappeared", path);
}

bool follow_file_unchanged(const follow_file *f, const char *path) {
    return f->inode && file_inode(path) == f->inode && file_bytes(path) == f->size &&
           file_modified_ns(path) == f->modified_ns;
}

/* ---- the text ---- */

static void put_line(bytes *to, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void put_line(bytes *to, const char *format, ...) {
    char line[512];
    va_list arguments;
    va_start(arguments, format);
    int size = vsnprintf(line, sizeof(line), format, arguments);
    va_end(arguments);
    bytes_put(to, line, size < 0 ? 0 : (size_t)size);
}

static void hex_of(char out[33], const hash128 *hash) {
    for (size_t i = 0; i < 16; i++) {
        snprintf(out + 2 * i, 3, "%02x", hash->bytes[i]);
    }
}

static void format_state(bytes *to, const follow_state *s) {
    char id[CKD_ID_TEXT], hex[33];
    ckd_id_text(id, &s->checkpoint);
    hex_of(hex, &s->choice);
    put_line(to,
             "{\n  \"schema\": 1,\n  \"checkpoint\": \"%s\",\n  \"run\": \"%s\",\n  \"step\": %" PRIu64
             ",\n  \"created_ns\": %" PRIu64 ",\n  \"tensor_bytes\": %" PRIu64
             ",\n  \"choice\": \"%s\",\n  \"files\": [",
             id, s->run, s->step, s->created_ns, s->tensor_bytes, hex);
    for (size_t i = 0; i < s->count; i++) {
        const follow_file *f = &s->files[i];
        hex_of(hex, &f->header);
        put_line(to,
                 "%s\n    {\"name\": \"%s\", \"size\": %" PRIu64 ", \"modified_ns\": %" PRIu64
                 ", \"inode\": %" PRIu64 ", \"header\": \"%s\"}",
                 i ? "," : "", f->name, f->size, f->modified_ns, f->inode, hex);
    }
    put_line(to, "\n  ]\n}\n");
}

static bool parse_hash(hash128 *out, const char *text) {
    ckd_id id;
    bool good = id_parse(&id, text);
    memcpy(out->bytes, id.bytes, sizeof(out->bytes));
    return good;
}

static bool parse_files(follow_state *s, const char *at) {
    for (;;) {
        char name[40], hex[33];
        follow_file f = {.name = ""};
        int used = 0;
        int fields = sscanf(at,
                            " { \"name\": \"%39[^\"]\", \"size\": %" SCNu64 ", \"modified_ns\": %" SCNu64
                            ", \"inode\": %" SCNu64 ", \"header\": \"%32[0-9a-f]\"}%n",
                            name, &f.size, &f.modified_ns, &f.inode, hex, &used);
        if (fields != 5 || used == 0 || strlen(hex) != 32 || !parse_hash(&f.header, hex) ||
            !follow_is_model_file(name) ||
            ARRAY_GROW(s->files, s->capacity, s->count + 1, "a folder's files", NULL) != CKD_OK) {
            return false;
        }
        memcpy(f.name, name, sizeof(f.name));
        s->files[s->count++] = f;
        at += used;
        if (*at != ',') {
            return strcmp(at, "\n  ]\n}\n") == 0;
        }
        at++;
    }
}

/* Accepts what format_state writes, and nothing else. */
static bool parse_state(follow_state *s, const char *text) {
    char id[33], run[CKD_RUN_MAX + 1], choice[33];
    int used = 0;
    int fields =
        sscanf(text,
               "{ \"schema\": 1, \"checkpoint\": \"%32[0-9a-f]\", \"run\": \"%128[^\"]\", \"step\": %" SCNu64
               ", \"created_ns\": %" SCNu64 ", \"tensor_bytes\": %" SCNu64
               ", \"choice\": \"%32[0-9a-f]\", \"files\": [%n",
               id, run, &s->step, &s->created_ns, &s->tensor_bytes, choice, &used);
    if (fields != 6 || used == 0 || strlen(id) != 32 || strlen(choice) != 32 ||
        !parse_hash(&s->choice, choice) || !id_parse(&s->checkpoint, id) || !run_name_valid(run)) {
        return false;
    }
    snprintf(s->run, sizeof(s->run), "%s", run);
    return parse_files(s, text + used);
}

static ckd_status read_state(follow_state *out, const char *path, ckd_error *err) {
    bytes text = {0};
    ckd_error why;
    *out = (follow_state){0};
    ckd_status status = file_read_all(&text, path, STATE_BYTES_MAX, &why);
    if (status == CKD_OK) {
        bytes_put_u8(&text, 0);
        if (text.failed || !parse_state(out, (const char *)text.data)) {
            follow_state_free(out);
        }
    }
    bytes_free(&text);
    return status == CKD_E_CORRUPT ? CKD_OK : err_except(err, status, CKD_E_NOT_FOUND, &why);
}

ckd_status follow_state_read(follow_state *out, const char *folder, ckd_error *err) {
    return read_state(out, follow_path_of(folder, FOLLOW_STATE).text, err);
}

/* ---- the journal ---- */

/* Calls `visit` for each name in the folder. */
typedef ckd_status (*name_fn)(const char *folder, const char *name, const follow_state *next, ckd_error *err);
static ckd_status each_name(const char *folder, name_fn visit, const follow_state *next, ckd_error *err) {
    dir_list list;
    ckd_status status = dir_list_read(&list, folder, err);
    if (status != CKD_OK) {
        return status;
    }
    for (size_t i = 0; i < list.count && status == CKD_OK; i++) {
        status = visit(folder, list.names[i], next, err);
    }
    dir_list_free(&list);
    return status;
}

static ckd_status remove_stale(const char *folder, const char *name, const follow_state *next,
                               ckd_error *err) {
    return follow_is_model_file(name) && !follow_state_find(next, name)
               ? file_remove(follow_path_of(folder, name).text, true, err)
               : CKD_OK;
}

static bool ends_with(const char *text, const char *end) {
    size_t length = strlen(text), size = strlen(end);
    return length >= size && strcmp(text + length - size, end) == 0;
}

static ckd_status remove_temporary(const char *folder, const char *name, const follow_state *next,
                                   ckd_error *err) {
    (void)next;
    return name[0] == '.' && ends_with(name, FOLLOW_NEW)
               ? file_remove(follow_path_of(folder, name).text, true, err)
               : CKD_OK;
}

/* Can be repeated: a missing new file has been renamed already. */
static ckd_status finish(const char *folder, const follow_state *next, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < next->count && status == CKD_OK; i++) {
        follow_path from = follow_path_new(folder, next->files[i].name);
        if (file_exists(from.text)) {
            status = file_rename(from.text, follow_path_of(folder, next->files[i].name).text, err);
        }
    }
    THEN(status, each_name(folder, remove_stale, next, err));
    THEN(status, dir_sync(folder, err));
    THEN(status, file_rename(follow_path_of(folder, FOLLOW_JOURNAL).text,
                             follow_path_of(folder, FOLLOW_STATE).text, err));
    THEN(status, dir_sync(folder, err));
    return status;
}

ckd_status follow_commit(bool *committed, const char *folder, const follow_state *next, ckd_error *err) {
    bytes text = {0};
    *committed = false;
    format_state(&text, next);
    ckd_status status = text.failed ? err_nomem(err, text.size, "the folder's state") : dir_sync(folder, err);
    THEN(status,
         file_replace_durable(follow_path_of(folder, FOLLOW_JOURNAL).text,
                              follow_path_new(folder, FOLLOW_JOURNAL).text, text.data, text.size, err));
    bytes_free(&text);
    *committed = status == CKD_OK || file_exists(follow_path_of(folder, FOLLOW_JOURNAL).text);
    THEN(status, finish(folder, next, err));
    return status;
}

ckd_status follow_recover(const char *folder, ckd_error *err) {
    follow_state next;
    follow_path journal = follow_path_of(folder, FOLLOW_JOURNAL);
    ckd_status status = read_state(&next, journal.text, err);
    if (status == CKD_OK && next.count) {
        status = finish(folder, &next, err);
    } else if (status == CKD_OK) {
        status = file_remove(journal.text, true, err);
    }
    follow_state_free(&next);
    THEN(status, each_name(folder, remove_temporary, NULL, err));
    return status;
}
