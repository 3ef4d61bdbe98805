/*
 * The layout of the folder. Headers depend on names, dtypes and shapes only, so the values of a tensor lie at the same
 * offset in every version.
 */
#include <ctype.h>
#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>

#include "engine/follow/follow.h"

#define SHARD_BYTES UINT64_C(5000000000) /* as in transformers */
#define SHARDS_MAX  99999u
#define HEADER_MAX  100000000u /* the format's limit */

/* ---- JSON ---- */

static void put_text(bytes *to, const char *text) {
    bytes_put(to, text, strlen(text));
}

static void put_number(bytes *to, uint64_t value) {
    char text[24];
    snprintf(text, sizeof(text), "%llu", (unsigned long long)value);
    put_text(to, text);
}

/* Names are valid UTF-8. */
static void put_string(bytes *to, const char *text) {
    put_text(to, "\"");
    for (const char *at = text; *at; at++) {
        unsigned char c = (unsigned char)*at;
        char escaped[8];
        if (c < 0x20) {
            snprintf(escaped, sizeof(escaped), "\\u%04x", c);
            put_text(to, escaped);
        } else {
            put_text(to, c == '"' || c == '\\' ? "\\" : "");
            bytes_put(to, at, 1);
        }
    }
    put_text(to, "\"");
}

/* The format has the dtype names of the library in capitals, except that "f8e4m3" is F8_E4M3. */
static void put_dtype(bytes *to, ckd_dtype dtype) {
    char text[16];
    size_t i = 0;
    for (const char *at = ckd_dtype_name(dtype); *at && i < sizeof(text) - 2; at++) {
        if (*at == 'e') {
            text[i++] = '_';
        }
        text[i++] = (char)toupper((unsigned char)*at);
    }
    text[i] = '\0';
    put_string(to, text);
}

/* ---- which tensors ---- */

static bool any_matches(const char *const *globs, size_t count, const char *name) {
    for (size_t i = 0; i < count; i++) {
        if (fnmatch(globs[i], name, 0) == 0) {
            return true;
        }
    }
    return false;
}

/* Returns the tensor's name in the folder, or NULL if the tensor does not belong to the member. */
static const char *name_in_folder(const ckd_follow_options *o, const ckd_tensor_info *info) {
    size_t length = o->member ? strlen(o->member) : 0;
    if (!o->member) {
        return info->name;
    }
    bool within = strncmp(info->name, o->member, length) == 0 && info->name[length] == '.';
    return within && info->name[length + 1] ? info->name + length + 1 : NULL;
}

static bool wanted(const ckd_follow_options *o, const ckd_tensor_info *info) {
    bool chosen = o->only_count ? any_matches(o->only, o->only_count, info->name)
                                : o->member || info->role == CKD_ROLE_WEIGHT;
    return chosen && name_in_folder(o, info) && !any_matches(o->exclude, o->exclude_count, info->name);
}

static ckd_status nothing_chosen(const ckd_follow_options *o, ckd_error *err) {
    return o->member
               ? err_set(err, CKD_E_MISMATCH,
                         "no tensor of the checkpoint is chosen: no name begins with '%.200s.'%s", o->member,
                         o->only_count || o->exclude_count ? " and matches the patterns" : "")
               : err_set(err, CKD_E_MISMATCH, "no tensor of the checkpoint is chosen: %s",
                         o->only_count ? "the patterns match none" : "none has the role weight");
}

static follow_shard *add_shard(follow_layout *l, size_t capacity, ckd_error *err) {
    if (ARRAY_GROW(l->shards, l->capacity, l->count + 1, "a folder's files", err) != CKD_OK) {
        return NULL;
    }
    follow_shard *s = &l->shards[l->count++];
    *s = (follow_shard){.tensors = calloc(capacity, sizeof(*s->tensors))};
    if (!s->tensors) {
        err_nomem(err, capacity * sizeof(*s->tensors), "a folder's files");
        return NULL;
    }
    return s;
}

/* Distributes the tensors in the order of the list. A file ends before the tensor that would make it too large. */
static ckd_status share_out(follow_layout *l, const ckd_tensor_list *list, const ckd_follow_options *o,
                            ckd_error *err) {
    uint64_t max = o->shard_bytes ? o->shard_bytes : SHARD_BYTES, used = 0;
    follow_shard *s = NULL;
    for (size_t i = 0; i < list->count; i++) {
        const ckd_tensor_info *info = &list->items[i];
        if (!wanted(o, info)) {
            continue;
        }
        const char *name = name_in_folder(o, info);
        if (strcmp(name, "__metadata__") == 0) {
            err_set(err, CKD_E_UNSUPPORTED, "a safetensors file cannot hold tensor '%s'", name);
            return err_in_tensor(err, CKD_E_UNSUPPORTED, info->name);
        }
        uint64_t size = info->elements * ckd_dtype_size(info->dtype);
        if (!s || (s->count && (size > max || used > max - size))) {
            s = add_shard(l, list->count - i, err);
            used = 0;
        }
        if (!s) {
            return CKD_E_NOMEM;
        }
        s->tensors[s->count++] = (follow_tensor){.info = info, .name = name, .size = size};
        used += size;
        l->tensor_bytes += size;
    }
    if (!s) {
        return nothing_chosen(o, err);
    }
    return l->count <= SHARDS_MAX
               ? CKD_OK
               : err_set(err, CKD_E_INVALID, "that would be %zu files; allow larger ones", l->count);
}

/* ---- files ---- */

/* Larger elements come first, so that each tensor is aligned. Tensors of equal element size keep their order. */
static int by_dtype_size(const void *left, const void *right) {
    const follow_tensor *a = left, *b = right;
    size_t size_a = ckd_dtype_size(a->info->dtype), size_b = ckd_dtype_size(b->info->dtype);
    if (size_a != size_b) {
        return size_a > size_b ? -1 : 1;
    }
    return a->info < b->info ? -1 : a->info > b->info;
}

static void put_tensor(bytes *to, const follow_tensor *t) {
    put_text(to, ",");
    put_string(to, t->name);
    put_text(to, ":{\"dtype\":");
    put_dtype(to, t->info->dtype);
    put_text(to, ",\"shape\":[");
    for (uint32_t d = 0; d < t->info->ndim; d++) {
        put_text(to, d ? "," : "");
        put_number(to, t->info->shape[d]);
    }
    put_text(to, "],\"data_offsets\":[");
    put_number(to, t->offset);
    put_text(to, ",");
    put_number(to, t->offset + t->size);
    put_text(to, "]}");
}

static ckd_status arrange(follow_shard *s, ckd_error *err) {
    bytes *h = &s->header;
    uint64_t end = 0;
    qsort(s->tensors, s->count, sizeof(*s->tensors), by_dtype_size);
    bytes_put_u64(h, 0);
    put_text(h, "{\"__metadata__\":{\"format\":\"pt\"}");
    for (size_t i = 0; i < s->count; i++) {
        follow_tensor *t = &s->tensors[i];
        t->offset = end;
        put_tensor(h, t);
        end += t->size;
    }
    put_text(h, "}");
    while (!h->failed && h->size % 8 != 0) {
        put_text(h, " ");
    }
    if (h->failed) {
        return err_nomem(err, h->size, "a file's header");
    }
    if (h->size - 8 > HEADER_MAX) {
        return err_set(err, CKD_E_UNSUPPORTED,
                       "a file's header would have %zu bytes, the format's limit is %u; allow smaller files",
                       h->size - 8, HEADER_MAX);
    }
    store_le64(h->data, h->size - 8);
    for (size_t i = 0; i < s->count; i++) {
        s->tensors[i].offset += h->size;
    }
    s->size = h->size + end;
    return CKD_OK;
}

/* As transformers writes it. */
static ckd_status make_index(follow_layout *l, ckd_error *err) {
    bytes *to = &l->index;
    put_text(to, "{\n  \"metadata\": {\n    \"total_size\": ");
    put_number(to, l->tensor_bytes);
    put_text(to, "\n  },\n  \"weight_map\": {");
    for (size_t i = 0, any = 0; i < l->count; i++) {
        for (size_t t = 0; t < l->shards[i].count; t++) {
            put_text(to, any++ ? ",\n    " : "\n    ");
            put_string(to, l->shards[i].tensors[t].name);
            put_text(to, ": ");
            put_string(to, l->shards[i].name);
        }
    }
    put_text(to, "\n  }\n}\n");
    return to->failed ? err_nomem(err, to->size, "the index of the files") : CKD_OK;
}

ckd_status follow_layout_make(follow_layout *out, const ckd_tensor_list *tensors,
                              const ckd_follow_options *options, ckd_error *err) {
    ckd_status status = share_out(out, tensors, options, err);
    for (size_t i = 0; i < out->count && status == CKD_OK; i++) {
        follow_shard *s = &out->shards[i];
        if (out->count == 1) {
            snprintf(s->name, sizeof(s->name), "model.safetensors");
        } else {
            snprintf(s->name, sizeof(s->name), "model-%05u-of-%05u.safetensors", (unsigned)(i + 1) % 100000u,
                     (unsigned)out->count % 100000u);
        }
        status = arrange(s, err);
    }
    return status == CKD_OK && out->count > 1 ? make_index(out, err) : status;
}

void follow_layout_free(follow_layout *l) {
    for (size_t i = 0; i < l->count; i++) {
        bytes_free(&l->shards[i].header);
        free(l->shards[i].tensors);
    }
    free(l->shards);
    bytes_free(&l->index);
    *l = (follow_layout){0};
}

ckd_status follow_choice(hash128 *out, const ckd_follow_options *o, ckd_error *err) {
    bytes text = {0};
    put_number(&text, o->shard_bytes ? o->shard_bytes : SHARD_BYTES);
    if (o->member) {
        put_text(&text, "m");
        put_string(&text, o->member);
    }
    for (size_t i = 0; i < o->only_count; i++) {
        put_text(&text, "+");
        put_string(&text, o->only[i]);
    }
    for (size_t i = 0; i < o->exclude_count; i++) {
        put_text(&text, "-");
        put_string(&text, o->exclude[i]);
    }
    *out = hash128_of(text.data, text.size);
    ckd_status status = text.failed ? err_nomem(err, text.size, "the options") : CKD_OK;
    bytes_free(&text);
    return status;
}

/* Whether there are five digits at `at`, followed by `rest`. */
static bool five_digits(const char *at, const char *rest) {
    return strspn(at, "0123456789") == 5 && strncmp(at + 5, rest, strlen(rest)) == 0;
}

bool follow_is_model_file(const char *name) {
    return strcmp(name, "model.safetensors") == 0 || strcmp(name, FOLLOW_INDEX) == 0 ||
           (strncmp(name, "model-", 6) == 0 && five_digits(name + 6, "-of-") &&
            five_digits(name + 15, ".safetensors") && name[32] == '\0');
}
