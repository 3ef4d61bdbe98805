/* Addresses, canonical queries, and hashes of what is sent. No I/O. */
#include "objects/s3/s3.h"

#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>

static bool is_unreserved(char c) {
    return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-' ||
           c == '.' || c == '_' || c == '~';
}

static bool bucket_valid(const char *bucket, size_t size) {
    if (size < 3 || size > 63 || bucket[0] == '.' || bucket[0] == '-') {
        return false;
    }
    for (size_t i = 0; i < size; i++) {
        if (!is_unreserved(bucket[i]) || bucket[i] == '~' || (bucket[i] == '.' && bucket[i + 1] == '.')) {
            return false;
        }
    }
    return true;
}

ckd_status s3_address_parse(s3_address *out, const char *address, ckd_error *err) {
    const char *bucket = address + strlen("s3://"), *slash = strchrnul(bucket, '/');
    size_t size = (size_t)(slash - bucket);
    const char *shown =
        strchr(bucket, '@') ? "s3://..." : address; /* other programs have keys in front of an @ */
    *out = (s3_address){0};
    if (!bucket_valid(bucket, size)) {
        return err_set(
            err, CKD_E_INVALID,
            "%.300s names no bucket: write s3://BUCKET/PREFIX, with a bucket of 3 to 63 bytes of A-Z a-z 0-9 . _ -",
            shown);
    }
    memcpy(out->bucket, bucket, size);
    const char *prefix = *slash ? slash + 1 : slash;
    size_t length = strlen(prefix);
    while (length > 0 && prefix[length - 1] == '/') {
        length--;
    }
    /* With a key behind it, S3's limit of 1024 bytes is kept. */
    if (length >= OBJECT_KEY_MAX - 1) {
        return err_set(err, CKD_E_INVALID, "the prefix of %.300s is longer than %d bytes", shown,
                       OBJECT_KEY_MAX - 2);
    }
    memcpy(out->prefix, prefix, length);
    if (length > 0 && !object_key_valid(out->prefix)) {
        return err_set(
            err, CKD_E_INVALID,
            "the prefix of %.300s cannot begin keys: write s3://BUCKET/PREFIX, with a prefix of A-Z a-z 0-9 . _ - and "
            "single slashes, and no part that begins with a dot",
            shown);
    }
    out->prefix[length] = length > 0 ? '/' : 0;
    return CKD_OK;
}

void s3_encode(bytes *out, const char *text) {
    static const char digits[] = "0123456789ABCDEF";
    for (const char *c = text; *c; c++) {
        if (is_unreserved(*c)) {
            bytes_put_u8(out, (uint8_t)*c);
        } else {
            bytes_put_u8(out, '%');
            bytes_put_u8(out, (uint8_t)digits[(uint8_t)*c >> 4]);
            bytes_put_u8(out, (uint8_t)digits[(uint8_t)*c & 15]);
        }
    }
}

static int digit_value(char c) {
    if (c >= '0' && c <= '9') {
        return c - '0';
    }
    c = (char)(c | 0x20);
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

bool s3_decode(char *text) {
    char *to = text;
    for (const char *c = text; *c; c++) {
        if (*c != '%') {
            *to++ = (char)(*c == '+' ? ' ' : *c);
            continue;
        }
        int high = digit_value(c[1]), low = high < 0 ? -1 : digit_value(c[2]);
        if (low < 0 || (high == 0 && low == 0)) {
            return false;
        }
        *to++ = (char)(high << 4 | low);
        c += 2;
    }
    *to = 0;
    return true;
}

static int compare_names(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Our names are letters and dashes, which are encoded as they are: sorting the names sorts their encoded form. */
void s3_query(bytes *out, const char *const *pairs) {
    const char *sorted[S3_QUERY_MAX][2];
    size_t count = 0;
    for (; pairs[2 * count] && count < S3_QUERY_MAX; count++) {
        sorted[count][0] = pairs[2 * count];
        sorted[count][1] = pairs[2 * count + 1];
    }
    qsort(sorted, count, sizeof(sorted[0]), compare_names);
    for (size_t i = 0; i < count; i++) {
        bytes_put_u8(out, i ? '&' : '?');
        s3_encode(out, sorted[i][0]);
        bytes_put_u8(out, '=');
        s3_encode(out, sorted[i][1]);
    }
}

uint64_t s3_part_size(uint64_t min, uint64_t size) {
    const uint64_t unit = UINT64_C(1) << 20, needed = size / S3_PARTS_MAX + (size % S3_PARTS_MAX != 0);
    uint64_t part = (needed + unit - 1) / unit * unit;
    return part > min ? part : min;
}

bool s3_sha256(char out[65], const void *data, size_t size) {
    unsigned char hash[EVP_MAX_MD_SIZE];
    unsigned length = 0;
    if (EVP_Digest(data, size, hash, &length, EVP_sha256(), NULL) != 1 || length != 32) {
        return false;
    }
    for (unsigned i = 0; i < length; i++) {
        snprintf(out + 2 * (size_t)i, 3, "%02x", hash[i]);
    }
    return true;
}

bool s3_md5(char out[32], const void *data, size_t size) {
    unsigned char hash[EVP_MAX_MD_SIZE];
    unsigned length = 0;
    return EVP_Digest(data, size, hash, &length, EVP_md5(), NULL) == 1 && length == 16 &&
           EVP_EncodeBlock((unsigned char *)out, hash, 16) == 24;
}

void s3_printable(char *out, size_t size, const char *text) {
    size_t n = 0;
    for (; *text && n + 1 < size; text++) {
        out[n++] = (char)(*text >= ' ' && *text <= '~' ? *text : '?');
    }
    out[n] = 0;
}
