/*
 * What a server of S3, a credentials file or a credentials service may say, from any bytes. A page that is accepted has
 * valid keys in order.
 */
#include <stdlib.h>

#include "objects/s3/s3.h"
#include "tests/support/fuzz.h"

static void try_listing(const bytes *text, const char *prefix) {
    object_page page = {0};
    s3_listed asked = {prefix, "", prefix, OBJECT_LIST_MAX};
    char *token = NULL;
    if (s3_listing_parse(&page, &asked, text, &token, NULL) == CKD_OK) {
        for (size_t i = 0; i < page.count; i++) {
            bool ordered = i == 0 || strcmp(page.items[i - 1].key, page.items[i].key) < 0;
            if (!ordered || !object_key_valid(page.items[i].key)) {
                abort();
            }
        }
    }
    if (token && (page.count > 0 || page.next)) {
        abort();
    }
    free(token);
    object_page_free(&page);
}

static void try_answers(const bytes *text) {
    s3_problem problem = {0};
    s3_uploads uploads = {0};
    char id[64];
    s3_problem_parse(&problem, text->data, text->size);
    for (const char *c = problem.message; *c; c++) {
        if (*c < ' ' || *c > '~') {
            abort();
        }
    }
    if (s3_uploads_parse(&uploads, text->data, text->size, NULL) == CKD_OK) {
        for (size_t i = 0; i < uploads.count; i++) {
            (void)s3_time_parse(uploads.items[i].begun);
            if (!uploads.items[i].key || !uploads.items[i].id) {
                abort();
            }
        }
    }
    s3_uploads_free(&uploads);
    (void)s3_text_parse(id, sizeof(id), "UploadId", text->data, text->size, NULL);
}

static void try_credentials(const bytes *text) {
    s3_profile profile = {0};
    s3_keys keys = {0};
    bool found = false;
    (void)s3_profile_parse(&profile, "default", false, text, &found, NULL);
    (void)s3_profile_parse(&profile, "some", true, text, &found, NULL);
    s3_profile_free(&profile);
    if (s3_keys_parse(&keys, text, "the fuzzer", NULL) == CKD_OK && (!keys.id || !keys.secret)) {
        abort();
    }
    s3_keys_free(&keys);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    bytes text = {0};
    bytes_put(&text, data, size);
    try_listing(&text, "");
    try_listing(&text, "p/");
    try_answers(&text);
    try_credentials(&text);
    bytes_free(&text);
    return 0;
}
