/* Which names objects may have: those that a file system, a URL and a signature all leave as they are. */
#include "objects/backend.h"

static bool is_key_byte(char c) {
    return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '.' ||
           c == '_' || c == '-';
}

/* Checks all parts between slashes. The last one may be empty if `open_end`. */
static bool parts_valid(const char *name, bool open_end) {
    size_t part = 0, i = 0;
    for (; name[i] && i <= OBJECT_KEY_MAX; i++) {
        if (name[i] == '/') {
            if (part == 0) {
                return false;
            }
            part = 0;
            continue;
        }
        if (!is_key_byte(name[i]) || (part == 0 && name[i] == '.') || ++part > OBJECT_PART_MAX) {
            return false;
        }
    }
    return i <= OBJECT_KEY_MAX && (part > 0 || open_end);
}

bool object_key_valid(const char *key) {
    return key && parts_valid(key, false);
}

bool object_prefix_valid(const char *prefix) {
    return prefix && parts_valid(prefix, true);
}

bool objects_address_is_remote(const char *address) {
    return address && strncmp(address, "s3://", 5) == 0;
}
