/*
 * Makes and parses the names of files in a store. A name must parse exactly, so that code that cleans up leaves other
 * files alone.
 */
#include "engine/store/paths.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/vocabulary.h"

pathname path_in(const char *store, const char *relative) {
    pathname p;
    snprintf(p.text, sizeof(p.text), "%s/%s", store, relative);
    return p;
}

pathname path_of(const char *store, const char *dir, const char *name) {
    pathname p;
    snprintf(p.text, sizeof(p.text), "%s/%s/%s", store, dir, name);
    return p;
}

pathname path_chunk(const char *store, const ckd_id *file, const char *suffix) {
    char hex[CKD_ID_TEXT];
    ckd_id_text(hex, file);
    pathname p;
    snprintf(p.text, sizeof(p.text), "%s/" DIR_CHUNKS "/%s.ckd%s", store, hex, suffix);
    return p;
}

pathname path_intent(const char *store, const ckd_id *save) {
    char hex[CKD_ID_TEXT];
    ckd_id_text(hex, save);
    return path_of(store, DIR_INTENTS, hex);
}

static pathname generation_of(const char *store, const char *dir, const char *run, uint64_t step,
                              uint32_t generation) {
    char name[CKD_RUN_MAX + 64];
    snprintf(name, sizeof(name), "%s.%" PRIu64 ".%" PRIu32, run, step, generation);
    return path_of(store, dir, name);
}

pathname path_manifest(const char *store, const char *run, uint64_t step, uint32_t generation) {
    return generation_of(store, DIR_MANIFESTS, run, step, generation);
}

pathname path_tombstone(const char *store, const char *run, uint64_t step, uint32_t generation) {
    return generation_of(store, DIR_TOMBSTONES, run, step, generation);
}

/* Parses decimal digits without leading zeros, at most `limit`. */
static bool parse_decimal(uint64_t *out, const char *text, size_t length, uint64_t limit) {
    if (length == 0 || length > 20 || (length > 1 && text[0] == '0')) {
        return false;
    }
    uint64_t value = 0;
    for (size_t i = 0; i < length; i++) {
        unsigned digit = (unsigned)(text[i] - '0');
        if (digit > 9 || value > (limit - digit) / 10) {
            return false;
        }
        value = value * 10 + digit;
    }
    *out = value;
    return true;
}

bool manifest_name_parse(manifest_name *out, const char *name) {
    memset(out, 0, sizeof(*out));
    const char *last = strrchr(name, '.');
    if (!last) {
        return false;
    }
    const char *middle = last;
    while (middle > name && middle[-1] != '.') {
        middle--;
    }
    size_t run_length = (size_t)(middle - name);
    if (run_length < 2 || run_length - 1 > CKD_RUN_MAX) {
        return false;
    }
    uint64_t generation;
    if (!parse_decimal(&out->step, middle, (size_t)(last - middle), INT64_MAX) ||
        !parse_decimal(&generation, last + 1, strlen(last + 1), UINT32_MAX)) {
        return false;
    }
    out->generation = (uint32_t)generation;
    memcpy(out->run, name, run_length - 1);
    return run_name_valid(out->run);
}

static const struct {
    metadata_kind kind;
    const char *word;
} metadata_kinds[] = {{METADATA_RENAME, "rename"},
                      {METADATA_PIN, "pin"},
                      {METADATA_TAG, "tag"},
                      {METADATA_POLICY, "policy"},
                      {METADATA_PARITY, "parity"}};

static bool setting_subject_valid(metadata_kind kind, const char *subject) {
    ckd_id id;
    if ((kind == METADATA_POLICY || kind == METADATA_PARITY) && strcmp(subject, POLICY_OF_ALL) == 0) {
        return true;
    }
    return kind == METADATA_PIN ? strlen(subject) == CKD_ID_TEXT - 1 && id_parse(&id, subject)
                                : run_name_valid(subject);
}

bool setting_name_parse(setting_name *out, const char *name) {
    memset(out, 0, sizeof(*out));
    const char *first = strchr(name, '.'), *last = strrchr(name, '.');
    size_t length = first && last > first ? (size_t)(last - first - 1) : 0;
    uint64_t generation;
    if (length == 0 || length > CKD_RUN_MAX ||
        !parse_decimal(&generation, last + 1, strlen(last + 1), UINT32_MAX)) {
        return false;
    }
    memcpy(out->name, first + 1, length);
    out->generation = (uint32_t)generation;
    for (size_t i = 0; i < sizeof(metadata_kinds) / sizeof(metadata_kinds[0]); i++) {
        const char *word = metadata_kinds[i].word;
        if (strlen(word) == (size_t)(first - name) && strncmp(word, name, strlen(word)) == 0) {
            out->kind = metadata_kinds[i].kind;
            return setting_subject_valid(out->kind, out->name);
        }
    }
    return false;
}

const char *setting_word(metadata_kind kind) {
    const char *word = "";
    for (size_t i = 0; i < sizeof(metadata_kinds) / sizeof(metadata_kinds[0]); i++) {
        word = metadata_kinds[i].kind == kind ? metadata_kinds[i].word : word;
    }
    return word;
}

pathname path_setting(const char *store, const setting_name *name) {
    char file[CKD_RUN_MAX + 64];
    snprintf(file, sizeof(file), "%s.%s.%" PRIu32, setting_word(name->kind), name->name, name->generation);
    return path_of(store, DIR_SETTINGS, file);
}

pathname path_parity(const char *store, const ckd_id *group_id, uint32_t row, const char *suffix) {
    char hex[CKD_ID_TEXT], name[96];
    ckd_id_text(hex, group_id);
    snprintf(name, sizeof(name), "%s.%" PRIu32 ".ckp%s", hex, row, suffix);
    return path_of(store, DIR_PARITY, name);
}

bool parity_name_parse(ckd_id *group_id, uint32_t *row, const char *name) {
    uint64_t number;
    size_t length = strlen(name), hex = CKD_ID_TEXT - 1;
    if (length < hex + 6 || !id_parse(group_id, name) || name[hex] != '.' ||
        strcmp(name + length - 4, ".ckp") != 0 ||
        !parse_decimal(&number, name + hex + 1, length - hex - 5, UINT32_MAX)) {
        return false;
    }
    *row = (uint32_t)number;
    return true;
}

#define PARITY_MARK ".incomplete.tmp"

pathname path_parity_mark(const char *store, const ckd_id *group_id) {
    char hex[CKD_ID_TEXT], name[96];
    ckd_id_text(hex, group_id);
    snprintf(name, sizeof(name), "%s" PARITY_MARK, hex);
    return path_of(store, DIR_PARITY, name);
}

bool parity_mark_parse(ckd_id *group_id, const char *name) {
    return strlen(name) >= CKD_ID_TEXT && id_parse(group_id, name) &&
           strcmp(name + CKD_ID_TEXT - 1, PARITY_MARK) == 0;
}

static int hex_digit(char c) {
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

bool id_parse(ckd_id *out, const char *text) {
    for (size_t i = 0; i < sizeof(out->bytes); i++) {
        int high = hex_digit(text[2 * i]), low = high < 0 ? -1 : hex_digit(text[2 * i + 1]);
        if (low < 0) {
            return false;
        }
        out->bytes[i] = (uint8_t)(high << 4 | low);
    }
    return true;
}
