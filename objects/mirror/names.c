/* Names of a store's files: which kind they are of, and their keys. */
#include "objects/mirror/mirror.h"

static bool ends_with(const char *text, const char *end) {
    size_t a = strlen(text), b = strlen(end);
    return a >= b && strcmp(text + a - b, end) == 0;
}

/* codec/FORMAT.md, "Store directory". Names that begin with a dot or end in .tmp are those of unfinished files. */
mount_kind mirror_kind(const char *name) {
    static const struct {
        const char *folder, *suffix;
        mount_kind kind;
    } folders[] = {
        {"data/m", "", MOUNT_COPIED},     /* manifests */
        {"data/t", "", MOUNT_COPIED},     /* tombstones */
        {"data/n", "", MOUNT_COPIED},     /* settings */
        {"data/c", ".ckd", MOUNT_REMOTE}, /* chunk files */
        {"data/p", ".ckp", MOUNT_REMOTE}, /* parity */
    };
    if (strcmp(name, "data/store") == 0 || strcmp(name, "data/deletions") == 0) {
        return MOUNT_COPIED;
    }
    for (size_t i = 0; i < sizeof(folders) / sizeof(folders[0]); i++) {
        size_t length = strlen(folders[i].folder);
        if (strncmp(name, folders[i].folder, length) != 0) {
            continue;
        }
        const char *file = name + length;
        bool shared = file[0] == '/' && file[1] != '.' && file[1] != 0 && !strchr(file + 1, '/') &&
                      !ends_with(file, ".tmp") && ends_with(file, folders[i].suffix);
        if (shared || file[0] == 0) {
            return folders[i].kind;
        }
    }
    return MOUNT_LOCAL;
}

static bool is_digit(char c) {
    return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'F');
}

static bool is_plain(const char *at) {
    char c = *at;
    bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
    bool escape = c == '_' && is_digit(at[1]) && is_digit(at[2]);
    return letter || c == '.' || c == '-' || c == '/' || (c == '_' && !escape);
}

ckd_status mirror_key(char out[OBJECT_KEY_MAX + 1], const char *name, ckd_error *err) {
    static const char digits[] = "0123456789ABCDEF";
    size_t size = 0;
    for (const char *at = name; *at && size <= OBJECT_KEY_MAX; at++) {
        if (is_plain(at)) {
            out[size++] = *at;
        } else if (size + 3 <= OBJECT_KEY_MAX) {
            out[size++] = '_';
            out[size++] = digits[(unsigned char)*at >> 4];
            out[size++] = digits[(unsigned char)*at & 15];
        } else {
            size = OBJECT_KEY_MAX + 1;
        }
    }
    if (size <= OBJECT_KEY_MAX) {
        out[size] = 0;
        if (object_key_valid(out)) {
            return CKD_OK;
        }
    }
    return err_set(err, CKD_E_INVALID,
                   "%.100s is too long for the key of an object, or cannot be one: choose a shorter name",
                   name);
}

static unsigned value_of(char digit) {
    return (unsigned)(digit <= '9' ? digit - '0' : digit - 'A' + 10);
}

bool mirror_name(char out[OBJECT_KEY_MAX + 1], const char *key) {
    size_t size = 0;
    char again[OBJECT_KEY_MAX + 1];
    for (const char *at = key; *at && size < OBJECT_KEY_MAX; size++) {
        bool escape = at[0] == '_' && is_digit(at[1]) && is_digit(at[2]);
        out[size] = escape ? (char)(value_of(at[1]) << 4 | value_of(at[2])) : *at;
        if (!out[size]) {
            return false;
        }
        at += escape ? 3 : 1;
    }
    out[size] = 0;
    return mirror_key(again, out, NULL) == CKD_OK && strcmp(again, key) == 0;
}
