/* Answers in XML, parsed by expat. Servers are not trusted: sizes are bounded, and entities are refused. */
#include "objects/s3/s3.h"

#include <expat.h>
#include <stdlib.h>

enum { DEPTH_MAX = 8, PATH_MAX_BYTES = 256 };

typedef struct document {
    XML_Parser parser;
    s3_element_fn element;
    void *context;
    ckd_error *err;
    ckd_status status;
    char path[PATH_MAX_BYTES];
    size_t depth, path_size;
    char text[S3_TEXT_MAX + 1];
    size_t text_size;
} document;

static void stop(document *d, const char *why) {
    if (d->status == CKD_OK) {
        d->status = err_set(d->err, CKD_E_CORRUPT, "%s", why);
    }
    (void)XML_StopParser(d->parser, XML_FALSE);
}

static void XMLCALL on_start(void *context, const XML_Char *name, const XML_Char **attributes) {
    document *d = context;
    size_t size = strlen(name);
    (void)attributes;
    if (d->depth == DEPTH_MAX || d->path_size + size + 2 > sizeof(d->path)) {
        stop(d, "the server's answer is nested too deeply");
        return;
    }
    if (d->depth++ > 0) {
        d->path[d->path_size++] = '/';
    }
    memcpy(d->path + d->path_size, name, size + 1);
    d->path_size += size;
    d->text_size = 0;
}

static void XMLCALL on_text(void *context, const XML_Char *text, int size) {
    document *d = context;
    if ((size_t)size > S3_TEXT_MAX - d->text_size) {
        stop(d, "a text in the server's answer is too long");
        return;
    }
    memcpy(d->text + d->text_size, text, (size_t)size);
    d->text_size += (size_t)size;
}

static bool is_space(char c) {
    return c == ' ' || c == '\n' || c == '\r' || c == '\t';
}

static void XMLCALL on_end(void *context, const XML_Char *name) {
    document *d = context;
    size_t first = 0;
    /* After a stop expat still reports the end of an empty element, whose name is not in the path. */
    if (d->status != CKD_OK) {
        return;
    }
    while (d->text_size > 0 && is_space(d->text[d->text_size - 1])) {
        d->text_size--;
    }
    while (first < d->text_size && is_space(d->text[first])) {
        first++;
    }
    d->text[d->text_size] = 0;
    d->status = d->element(d->context, d->path, d->text + first, d->err);
    if (d->status != CKD_OK) {
        (void)XML_StopParser(d->parser, XML_FALSE);
    }
    d->text_size = 0;
    d->path_size -= strlen(name);
    d->path_size -= --d->depth > 0;
    d->path[d->path_size] = 0;
}

static void XMLCALL on_document_type(void *context, const XML_Char *name, const XML_Char *system,
                                     const XML_Char *public_id, int has_internal) {
    (void)name, (void)system, (void)public_id, (void)has_internal;
    stop(context, "the server's answer has a document type, which may hide entities");
}

ckd_status s3_xml_parse(const void *data, size_t size, s3_element_fn element, void *context, ckd_error *err) {
    if (size > S3_ANSWER_MAX) {
        return err_set(err, CKD_E_CORRUPT, "the server's answer is larger than %d bytes", S3_ANSWER_MAX);
    }
    document *d = calloc(1, sizeof(*d));
    XML_Parser parser = d ? XML_ParserCreate(NULL) : NULL;
    if (!parser) {
        free(d);
        return err_nomem(err, sizeof(*d), "a parser");
    }
    *d = (document){.parser = parser, .element = element, .context = context, .err = err};
    XML_SetUserData(parser, d);
    XML_SetElementHandler(parser, on_start, on_end);
    XML_SetCharacterDataHandler(parser, on_text);
    XML_SetStartDoctypeDeclHandler(parser, on_document_type);
    if (XML_Parse(parser, data, (int)size, XML_TRUE) != XML_STATUS_OK && d->status == CKD_OK) {
        enum XML_Error code = XML_GetErrorCode(parser);
        d->status = code == XML_ERROR_NO_MEMORY
                        ? err_nomem(err, size, "a parser")
                        : err_set(err, CKD_E_CORRUPT, "the server's answer is not valid XML: %s",
                                  XML_ErrorString(code));
    }
    ckd_status status = d->status;
    XML_ParserFree(parser);
    free(d);
    return status;
}

/* ---- errors, single texts ---- */

static ckd_status take_problem(void *context, const char *path, const char *text, ckd_error *err) {
    s3_problem *p = context;
    (void)err;
    if (strcmp(path, "Error/Code") == 0) {
        s3_printable(p->code, sizeof(p->code), text);
    } else if (strcmp(path, "Error/Message") == 0) {
        s3_printable(p->message, sizeof(p->message), text);
    } else if (strcmp(path, "Error/Region") == 0) {
        s3_printable(p->region, sizeof(p->region), text);
    }
    return CKD_OK;
}

void s3_problem_parse(s3_problem *out, const void *data, size_t size) {
    ckd_error ignored;
    (void)s3_xml_parse(data, size, take_problem, out, &ignored);
}

typedef struct wanted {
    char *out;
    size_t capacity;
    const char *path;
    bool found;
} wanted;

static ckd_status take_text(void *context, const char *path, const char *text, ckd_error *err) {
    wanted *w = context;
    const char *below = strchr(path, '/');
    if (!below || strcmp(below + 1, w->path) != 0) {
        return CKD_OK;
    }
    if (strlen(text) >= w->capacity) {
        return err_set(err, CKD_E_CORRUPT, "%s in the server's answer is too long", w->path);
    }
    strcpy(w->out, text);
    w->found = true;
    return CKD_OK;
}

ckd_status s3_text_parse(char *out, size_t capacity, const char *path, const void *data, size_t size,
                         ckd_error *err) {
    wanted w = {out, capacity, path, false};
    ckd_status status = s3_xml_parse(data, size, take_text, &w, err);
    return status != CKD_OK || w.found ? status
                                       : err_set(err, CKD_E_CORRUPT, "the server's answer has no %s", path);
}
