/*
 * Plans an export: which tensors and blobs go into which file of the folder, and under which names. Also recognises
 * files of an earlier export, which a new one may replace.
 */
#include "cli/convert/convert.h"

#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli/files/files.h"

#define INDEX_NAME  "model.safetensors.index.json"
#define BLOB_FOLDER "blobs"
#define SHARDS_MAX  99999 /* names have five digits */

/* ---- selection ---- */

static ckd_status add_role(export_choice *c, const char *name, ckd_error *err) {
    ckd_role role = cli_role_by_name(name);
    if (role != CKD_ROLE_AUTO) {
        c->roles[role] = true;
        return CKD_OK;
    }
    return cli_error(
        err, CKD_E_INVALID,
        "--only takes roles separated by commas: weight, exp_avg, exp_avg_sq, master, other; not "
        "'%.100s'",
        name);
}

ckd_status export_choice_roles(export_choice *c, const char *text, ckd_error *err) {
    char *copy = strdup(text), *next = copy, *name;
    ckd_status status = copy ? CKD_OK : cli_error_nomem(err);
    while (status == CKD_OK && (name = strsep(&next, ","))) {
        status = add_role(c, name, err);
    }
    free(copy);
    c->some = true;
    return status;
}

ckd_status export_choice_match(export_choice *c, const char *text, ckd_error *err) {
    regex_t *grown = realloc(c->patterns, (c->pattern_count + 1) * sizeof(*grown));
    if (!grown) {
        return cli_error_nomem(err);
    }
    c->patterns = grown;
    int failed = regcomp(&grown[c->pattern_count], text, REG_EXTENDED | REG_NOSUB);
    if (failed) {
        char why[128];
        regerror(failed, &grown[c->pattern_count], why, sizeof(why));
        return cli_error(err, CKD_E_INVALID, "--match is an extended regular expression, not '%.200s': %s",
                         text, why);
    }
    c->pattern_count++;
    c->some = true;
    return CKD_OK;
}

ckd_status export_choice_dtype(export_choice *c, const char *text, ckd_error *err) {
    static const ckd_dtype dtypes[] = {CKD_BF16, CKD_F16, CKD_F32};
    for (size_t i = 0; i < sizeof(dtypes) / sizeof(dtypes[0]); i++) {
        if (strcmp(ckd_dtype_name(dtypes[i]), text) == 0) {
            c->dtype = dtypes[i];
            return CKD_OK;
        }
    }
    return cli_error(err, CKD_E_INVALID, "--dtype is bf16, f16 or f32, not '%.100s'", text);
}

void export_choice_free(export_choice *c) {
    for (size_t i = 0; i < c->pattern_count; i++) {
        regfree(&c->patterns[i]);
    }
    free(c->patterns);
}

static bool wanted(const export_choice *c, const ckd_tensor_info *info) {
    bool any_role = false, matches = c->pattern_count == 0;
    for (ckd_role role = CKD_ROLE_WEIGHT; role <= CKD_ROLE_OTHER; role++) {
        any_role = any_role || c->roles[role];
    }
    for (size_t i = 0; i < c->pattern_count && !matches; i++) {
        matches = regexec(&c->patterns[i], info->name, 0, NULL, 0) == 0;
    }
    return matches && (!any_role || c->roles[info->role]);
}

/* Returns the dtype to write it in. */
static ckd_dtype dtype_of(const export_choice *c, const ckd_tensor_info *info) {
    bool weight = info->role == CKD_ROLE_WEIGHT || info->role == CKD_ROLE_MASTER;
    return c->dtype != CKD_DTYPE_NONE && weight && cli_is_float(info->dtype) ? c->dtype : info->dtype;
}

/* ---- files ---- */

static export_file *add_file(export_plan *p, ckd_error *err) {
    export_file *grown = realloc(p->files, (p->count + 1) * sizeof(*grown));
    if (!grown) {
        cli_error_nomem(err);
        return NULL;
    }
    p->files = grown;
    grown[p->count] = (export_file){0};
    return &grown[p->count++];
}

static ckd_status add_tensor(export_file *f, const export_choice *c, const ckd_tensor_info *info,
                             size_t capacity, ckd_error *err) {
    file_content *to = &f->content;
    if (!to->tensors) {
        to->tensors = calloc(capacity, sizeof(*to->tensors));
        to->stored = calloc(capacity, sizeof(*to->stored));
    }
    if (!to->tensors || !to->stored) {
        return cli_error_nomem(err);
    }
    safetensors_tensor *t = &to->tensors[to->count];
    *t = (safetensors_tensor){.name = info->name,
                              .dtype = dtype_of(c, info),
                              .ndim = info->ndim,
                              .elements = info->elements,
                              .number = to->count};
    memcpy(t->shape, info->shape, sizeof(t->shape));
    to->stored[to->count++] = info->dtype;
    return CKD_OK;
}

/* Distributes tensors in save order. A file ends before the tensor that would make it too large. */
static ckd_status share_out(export_plan *p, const export_choice *c, const ckd_tensor_list *list,
                            ckd_error *err) {
    export_file *f = NULL;
    uint64_t used = 0;
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < list->count && status == CKD_OK; i++) {
        const ckd_tensor_info *info = &list->items[i];
        if (!wanted(c, info)) {
            p->left_out++;
            continue;
        }
        uint64_t size = info->elements * ckd_dtype_size(dtype_of(c, info));
        if (!f || (f->content.count && (size > c->max || used > c->max - size))) {
            f = add_file(p, err);
            used = 0;
        }
        status = f ? add_tensor(f, c, info, list->count - i, err) : CKD_E_NOMEM;
        used += size;
        p->tensors++;
        p->tensor_bytes += size;
        p->cast += dtype_of(c, info) != info->dtype;
    }
    if (status == CKD_OK && !f && list->count) {
        status = cli_error(
            err, CKD_E_NOT_FOUND,
            "--only and --match select no tensor of this checkpoint; ckptdelta show lists its tensors");
    } else if (status == CKD_OK && !f) {
        status = add_file(p, err) ? CKD_OK : CKD_E_NOMEM;
    }
    return status == CKD_OK && p->count > SHARDS_MAX
               ? cli_error(err, CKD_E_INVALID, "that would be %zu files; make --max-shard-size larger",
                           p->count)
               : status;
}

/* Finds the metadata. Libraries require a "format" before they read a model; it is "pt" if the trainer set none. */
static ckd_status find_metadata(json_t **out, ckd_load *load, ckd_error *err) {
    ckd_status status = file_metadata(out, load, err);
    if (status == CKD_OK && !*out) {
        *out = json_object();
    }
    if (status == CKD_OK && !json_object_get(*out, "format") &&
        json_object_set_new(*out, "format", json_string("pt")) != 0) {
        status = cli_error_nomem(err);
    }
    return status;
}

static ckd_status name_shards(export_plan *p, json_t *metadata, ckd_error *err) {
    size_t shards = p->count;
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < shards && status == CKD_OK; i++) {
        export_file *f = &p->files[i];
        int length = shards == 1 ? asprintf(&f->name, "model.safetensors")
                                 : asprintf(&f->name, "model-%05zu-of-%05zu.safetensors", i + 1, shards);
        if (length < 0) {
            f->name = NULL;
            return cli_error_nomem(err);
        }
        status = file_content_arrange(&f->content, metadata, err);
        f->tensors = f->content.count;
        f->bytes = f->content.header_size + f->content.data_size;
    }
    return status;
}

/* ---- blobs ---- */

/*
 * Makes a file name: letters, digits and "._-" stay, except a leading dot; everything else becomes %XX. NULL if out of
 * memory.
 */
static char *blob_file_name(const char *blob) {
    static const char plain[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-.";
    char *name = malloc(sizeof(BLOB_FOLDER) + 3 * strlen(blob) + 1), *to = name;
    if (!name) {
        return NULL;
    }
    to += sprintf(to, BLOB_FOLDER "/");
    for (const char *at = blob; *at; at++) {
        bool as_it_is = strchr(plain, *at) && (*at != '.' || at != blob);
        to += as_it_is ? sprintf(to, "%c", *at) : sprintf(to, "%%%02X", (unsigned)(unsigned char)*at);
    }
    return name;
}

static ckd_status add_blobs(export_plan *p, ckd_load *load, ckd_error *err) {
    ckd_status status = ckd_load_blobs(&p->blobs, load, err);
    for (size_t i = 0; status == CKD_OK && i < p->blobs->count; i++) {
        const ckd_blob_info *blob = &p->blobs->items[i];
        if (strcmp(blob->name, METADATA_BLOB) == 0) {
            continue; /* it is in the tensor files' headers */
        }
        export_file *f = add_file(p, err);
        if (!f) {
            return CKD_E_NOMEM;
        }
        f->blob = blob->name;
        f->bytes = blob->size;
        f->name = blob_file_name(blob->name);
        status = f->name ? CKD_OK : cli_error_nomem(err);
        if (status == CKD_OK && strlen(f->name) - sizeof(BLOB_FOLDER) > NAME_MAX - 32) {
            status = cli_error(err, CKD_E_UNSUPPORTED,
                               "blob '%.200s' has a name too long for a file; leave blobs out with --only",
                               f->blob);
        }
    }
    return status;
}

/* ---- the index ---- */

static ckd_status make_index(export_plan *p, size_t shards, ckd_error *err) {
    json_t *map = json_object();
    for (size_t i = 0; i < shards; i++) {
        const file_content *c = &p->files[i].content;
        for (size_t t = 0; t < c->count; t++) {
            if (json_object_set_new(map, c->tensors[t].name, json_string(p->files[i].name)) != 0) {
                json_decref(map);
                return cli_error_nomem(err);
            }
        }
    }
    json_t *root =
        json_pack("{s:{s:I}, s:o}", "metadata", "total_size", (json_int_t)p->tensor_bytes, "weight_map", map);
    p->index = root ? json_dumps(root, JSON_INDENT(2) | JSON_SORT_KEYS) : NULL;
    json_decref(root);
    export_file *f = p->index ? add_file(p, err) : NULL;
    char *name = f ? strdup(INDEX_NAME) : NULL;
    if (!name) {
        return cli_error_nomem(err);
    }
    f->name = name;
    f->bytes = strlen(p->index);
    return CKD_OK;
}

/* ---- the plan ---- */

ckd_status export_plan_make(export_plan *out, const export_choice *choice, ckd_load *load, ckd_error *err) {
    *out = (export_plan){0};
    json_t *metadata = NULL;
    ckd_status status = share_out(out, choice, ckd_load_tensors(load), err);
    size_t shards = out->count;
    THEN(status, find_metadata(&metadata, load, err));
    THEN(status, name_shards(out, metadata, err));
    json_decref(metadata);
    if (status == CKD_OK && !choice->some) {
        status = add_blobs(out, load, err);
    }
    if (status == CKD_OK && shards > 1) {
        status = make_index(out, shards, err);
    }
    for (size_t i = 0; i < out->count; i++) {
        out->bytes += out->files[i].bytes;
    }
    return status;
}

void export_plan_free(export_plan *p) {
    for (size_t i = 0; i < p->count; i++) {
        free(p->files[i].name);
        file_content_free(&p->files[i].content);
    }
    free(p->files);
    free(p->index);
    ckd_blob_list_free(p->blobs);
    *p = (export_plan){0};
}

/* ---- what an export may replace ---- */

/* Are there five digits at `at`, followed by `rest`? */
static bool five_digits(const char *at, const char *rest) {
    return strspn(at, "0123456789") == 5 && strncmp(at + 5, rest, strlen(rest)) == 0;
}

/*
 * Could an export have written a blob under this name? If so, decoding the name and encoding it again gives the same
 * name.
 */
static bool is_blob_file(const char *name) {
    char blob[NAME_MAX + 1], *to = blob;
    for (const char *at = name + sizeof(BLOB_FOLDER); *at && to < blob + NAME_MAX; at++) {
        unsigned byte = (unsigned char)*at;
        if (byte == '%') {
            if (sscanf(at, "%%%2X", &byte) != 1 || !at[1] || !at[2]) {
                return false;
            }
            at += 2;
        }
        *to++ = (char)byte;
    }
    *to = '\0';
    char *again = blob_file_name(blob);
    bool same = again && *blob && strcmp(again, name) == 0 && strcmp(blob, METADATA_BLOB) != 0;
    free(again);
    return same;
}

static bool has_file(const char *path, const char *name) {
    char *file;
    if (asprintf(&file, "%s/%s", path, name) < 0) {
        return false;
    }
    bool has = access(file, F_OK) == 0;
    free(file);
    return has;
}

bool export_replaceable(const char *path, const char *name, bool folder) {
    if (folder) {
        return strcmp(name, BLOB_FOLDER) == 0 &&
               (has_file(path, "model.safetensors") || has_file(path, INDEX_NAME));
    }
    if (strncmp(name, BLOB_FOLDER "/", sizeof(BLOB_FOLDER)) == 0) {
        return is_blob_file(name);
    }
    return strcmp(name, "model.safetensors") == 0 || strcmp(name, INDEX_NAME) == 0 ||
           (strncmp(name, "model-", 6) == 0 && five_digits(name + 6, "-of-") &&
            five_digits(name + 15, ".safetensors") && name[32] == '\0');
}
