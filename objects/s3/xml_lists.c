/* Lists of objects and of uploads, from XML. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "objects/s3/s3.h"

#include <errno.h>
#include <stdlib.h>
#include <time.h>

/* ---- objects ---- */

/* The encoding is named after the keys by some servers, so keys are decoded at the end. */
typedef struct listing {
    object_item *items;
    size_t count, capacity;
    object_item item; /* the one that is being read */
    uint32_t limit;
    char *token;
    bool whole, truncated, ended, encoded; /* ended: it says that it is not truncated */
} listing;

static ckd_status set_text(char **to, const char *text, ckd_error *err) {
    free(*to);
    *to = strdup(text);
    return *to ? CKD_OK : err_nomem(err, strlen(text), "a text of the server's answer");
}

static bool read_number(uint64_t *out, const char *text) {
    char *end;
    errno = 0;
    unsigned long long n = *text >= '0' && *text <= '9' ? strtoull(text, &end, 10) : (end = (char *)text, 0);
    *out = n;
    return end != text && *end == 0 && errno == 0;
}

/* As 2009-10-12T17:50:30.000Z. 0 for anything else. */
static uint64_t read_time(const char *text) {
    struct tm t = {.tm_isdst = 0};
    const char *end = strptime(text, "%Y-%m-%dT%H:%M:%S", &t);
    time_t seconds = end ? timegm(&t) : 0;
    return seconds > 0 ? (uint64_t)seconds : 0;
}

/* Without the quotes. A tag that is too long is cut at its beginning. */
static void set_tag(object_item *item, const char *text) {
    size_t length = strlen(text);
    bool quoted = length >= 2 && text[0] == '"' && text[length - 1] == '"';
    const char *from = quoted ? text + 1 : text;
    length -= quoted ? 2 : 0;
    size_t kept = length < sizeof(item->tag) ? length : sizeof(item->tag) - 1;
    memcpy(item->tag, from + length - kept, kept);
    item->tag[kept] = 0;
}

static ckd_status end_item(listing *l, ckd_error *err) {
    if (!l->item.key) {
        return err_set(err, CKD_E_CORRUPT, "the server listed an object without a key");
    }
    ckd_status status =
        l->count < l->limit
            ? ARRAY_GROW(l->items, l->capacity, l->count + 1, "keys of objects", err)
            : err_set(err, CKD_E_CORRUPT, "the server listed more objects than it was asked for");
    if (status == CKD_OK) {
        l->items[l->count++] = l->item;
        l->item = (object_item){.key = NULL};
    }
    return status;
}

static ckd_status take_listing(void *context, const char *path, const char *text, ckd_error *err) {
    listing *l = context;
    if (strcmp(path, "ListBucketResult/Contents/Key") == 0) {
        return set_text(&l->item.key, text, err);
    }
    if (strcmp(path, "ListBucketResult/Contents/Size") == 0) {
        return read_number(&l->item.size, text)
                   ? CKD_OK
                   : err_set(err, CKD_E_CORRUPT, "the server listed an object whose size is not a number");
    }
    if (strcmp(path, "ListBucketResult/Contents/ETag") == 0) {
        set_tag(&l->item, text);
    } else if (strcmp(path, "ListBucketResult/Contents/LastModified") == 0) {
        l->item.modified_s = read_time(text);
    } else if (strcmp(path, "ListBucketResult/Contents") == 0) {
        return end_item(l, err);
    }
    if (strcmp(path, "ListBucketResult/IsTruncated") == 0) {
        l->truncated = strcasecmp(text, "true") == 0;
        l->ended = strcasecmp(text, "false") == 0;
    } else if (strcmp(path, "ListBucketResult/NextContinuationToken") == 0) {
        return set_text(&l->token, text, err);
    } else if (strcmp(path, "ListBucketResult/EncodingType") == 0) {
        l->encoded = strcmp(text, "url") == 0;
    } else if (strcmp(path, "ListBucketResult") == 0) {
        l->whole = true;
    }
    return CKD_OK;
}

/* Decodes a key, checks that it comes after the last one, and takes the prefix off. */
static ckd_status add_item(object_page *out, listing *l, size_t i, const s3_listed *asked, ckd_error *err) {
    char *key = l->items[i].key;
    const char *prefix = asked->prefix, *last = i > 0 ? l->items[i - 1].key : asked->after;
    if (l->encoded && !s3_decode(key)) {
        return err_set(err, CKD_E_CORRUPT, "the server listed a key that is not encoded as declared");
    }
    if (strncmp(key, asked->within, strlen(asked->within)) != 0) {
        return err_set(err, CKD_E_CORRUPT, "the server listed a key that does not begin with %s",
                       asked->within);
    }
    if (*last && strcmp(last, key) >= 0) {
        return err_set(
            err, CKD_E_UNSUPPORTED,
            "the server lists %.150s after %.150s, which is not the order of bytes: it lists folder by "
            "folder, so no name may be that of a folder beside it followed by a dot or a dash",
            key, last);
    }
    const char *own = key + strlen(prefix);
    if (!object_key_valid(own)) {
        return CKD_OK;
    }
    object_item item = l->items[i];
    item.key = (char *)own;
    return object_page_add(out, &item, err);
}

/* Where does the list go on? A list that ends too early would hide objects, so its end must be said. */
static ckd_status find_next(object_page *out, listing *l, const s3_listed *asked, char **token,
                            ckd_error *err) {
    if (l->truncated && l->count > 0) {
        return set_text(&out->next, l->items[l->count - 1].key + strlen(asked->prefix), err);
    }
    if (l->truncated && l->token && *l->token) {
        *token = l->token;
        l->token = NULL;
        return CKD_OK;
    }
    return l->ended ? CKD_OK
                    : err_set(err, CKD_E_CORRUPT,
                              l->truncated
                                  ? "the server listed nothing, and says that there is more, but not where"
                                  : "the server does not say whether its list is complete");
}

ckd_status s3_listing_parse(object_page *out, const s3_listed *asked, const bytes *answer, char **token,
                            ckd_error *err) {
    listing l = {.limit = asked->limit};
    *token = NULL;
    ckd_status status = s3_xml_parse(answer->data, answer->size, take_listing, &l, err);
    if (status == CKD_OK && !l.whole) {
        status = err_set(err, CKD_E_CORRUPT, "the server's answer is not a list of objects");
    }
    for (size_t i = 0; i < l.count && status == CKD_OK; i++) {
        status = add_item(out, &l, i, asked, err);
    }
    THEN(status, find_next(out, &l, asked, token, err));
    for (size_t i = 0; i < l.count; i++) {
        free(l.items[i].key);
    }
    free(l.items);
    free(l.item.key);
    free(l.token);
    return status;
}

/* ---- uploads ---- */

typedef struct upload_parser {
    s3_uploads *out;
    s3_upload now;
    bool whole, truncated;
} upload_parser;

static void free_upload(s3_upload *u) {
    free(u->key);
    free(u->id);
    free(u->begun);
    *u = (s3_upload){0};
}

static ckd_status end_upload(upload_parser *p, ckd_error *err) {
    s3_uploads *list = p->out;
    if (!p->now.key || !p->now.id || !p->now.begun || list->count == OBJECT_LIST_MAX) {
        return err_set(err, CKD_E_CORRUPT,
                       "the server listed an upload without its key, id or time, or too many");
    }
    ckd_status status = ARRAY_GROW(list->items, list->capacity, list->count + 1, "uploads", err);
    if (status == CKD_OK) {
        list->items[list->count++] = p->now;
        p->now = (s3_upload){0};
    }
    return status;
}

static ckd_status take_upload(void *context, const char *path, const char *text, ckd_error *err) {
    upload_parser *p = context;
    const char *base = "ListMultipartUploadsResult";
    size_t size = strlen(base);
    if (strncmp(path, base, size) != 0) {
        return CKD_OK;
    }
    path += size;
    if (!*path) {
        p->whole = true;
    } else if (strcmp(path, "/Upload/Key") == 0) {
        return set_text(&p->now.key, text, err);
    } else if (strcmp(path, "/Upload/UploadId") == 0) {
        return set_text(&p->now.id, text, err);
    } else if (strcmp(path, "/Upload/Initiated") == 0) {
        return set_text(&p->now.begun, text, err);
    } else if (strcmp(path, "/Upload") == 0) {
        return end_upload(p, err);
    } else if (strcmp(path, "/IsTruncated") == 0) {
        p->truncated = strcmp(text, "true") == 0;
    } else if (strcmp(path, "/NextKeyMarker") == 0) {
        return set_text(&p->out->next_key, text, err);
    } else if (strcmp(path, "/NextUploadIdMarker") == 0) {
        return set_text(&p->out->next_id, text, err);
    }
    return CKD_OK;
}

ckd_status s3_uploads_parse(s3_uploads *out, const void *data, size_t size, ckd_error *err) {
    upload_parser p = {.out = out};
    ckd_status status = s3_xml_parse(data, size, take_upload, &p, err);
    if (status == CKD_OK && !p.whole) {
        status = err_set(err, CKD_E_CORRUPT, "the server's answer is not a list of uploads");
    }
    free_upload(&p.now);
    if (!p.truncated || !out->next_key || !*out->next_key || out->count == 0) {
        free(out->next_key);
        free(out->next_id);
        out->next_key = out->next_id = NULL;
    }
    return status;
}

void s3_uploads_free(s3_uploads *list) {
    for (size_t i = 0; i < list->count; i++) {
        free_upload(&list->items[i]);
    }
    free(list->items);
    free(list->next_key);
    free(list->next_id);
    *list = (s3_uploads){0};
}
