/* The growing buffer, the bounded cursor, and UTF-8. */
#include "base/bytes.h"

#include <stdlib.h>
#include <sys/mman.h>

/* ---- writing ---- */

#define SMALLEST_CAPACITY 256
#define LARGE             ((size_t)4 << 20)
/* the smallest page; with larger ones the system refuses the advice, which does no harm */
#define PAGE ((uintptr_t)4096)

void bytes_free(bytes *b) {
    free(b->data);
    *b = (bytes){0};
}

/* Asks for huge pages where the system gives them on request. A page fault takes longer than writing a small page. */
static void advise(const void *data, size_t size) {
#if defined(MADV_HUGEPAGE)
    uintptr_t start = ((uintptr_t)data + PAGE - 1) / PAGE * PAGE,
              end = ((uintptr_t)data + size) / PAGE * PAGE;
    if (size >= LARGE) {
        (void)madvise((void *)start, end - start, MADV_HUGEPAGE);
    }
#else
    (void)data;
    (void)size;
#endif
}

ckd_status array_grow(void *array, size_t *capacity, size_t count, size_t size, const char *what,
                      ckd_error *err) {
    void *items;
    uint64_t new_capacity = *capacity < 8 ? 16 : 2 * (uint64_t)*capacity, total;
    if (count <= *capacity) {
        return CKD_OK;
    }
    new_capacity = new_capacity < count ? count : new_capacity;
    if (!size_mul(&total, new_capacity, size) || total > SIZE_MAX) {
        return err_nomem(err, SIZE_MAX, what);
    }
    memcpy(&items, array, sizeof(items)); /* the pointer may have any type */
    items = realloc(items, (size_t)total);
    if (items == NULL) {
        return err_nomem(err, total, what);
    }
    memcpy(array, &items, sizeof(items));
    *capacity = (size_t)new_capacity;
    return CKD_OK;
}

/* Grows by half: appends stay linear, and a large buffer wastes at most a third. */
static bool grow(bytes *b, size_t needed) {
    size_t capacity = b->capacity;
    if (__builtin_add_overflow(capacity, capacity / 2, &capacity) || capacity < needed) {
        capacity = needed;
    }
    if (capacity < SMALLEST_CAPACITY) {
        capacity = SMALLEST_CAPACITY;
    }
    uint8_t *data = realloc(b->data, capacity);
    if (data == NULL && capacity > needed && needed > 0) {
        capacity = needed;
        data = realloc(b->data, capacity);
    }
    if (data == NULL) {
        return false;
    }
    advise(data, capacity);
    b->data = data;
    b->capacity = capacity;
    return true;
}

void *bytes_extend(bytes *b, size_t size) {
    size_t needed;
    if (b->failed) {
        return NULL;
    }
    if (__builtin_add_overflow(b->size, size, &needed) ||
        needed > PTRDIFF_MAX || /* no allocator gives that much, and some crash when asked */
        ((needed > b->capacity || b->data == NULL) && !grow(b, needed))) {
        b->failed = true;
        return NULL;
    }
    void *at = b->data + b->size;
    b->size = needed;
    return at;
}

void *bytes_scratch(bytes *b, uint64_t size, const char *what, ckd_error *err) {
    bytes_clear(b);
    void *memory = size <= SIZE_MAX ? bytes_extend(b, size ? (size_t)size : 1) : NULL;
    if (!memory) {
        b->failed = false;
        err_nomem(err, (size_t)size, what);
    }
    return memory;
}

void bytes_put(bytes *b, const void *data, size_t size) {
    void *to = bytes_extend(b, size);
    if (to != NULL && size > 0) {
        memcpy(to, data, size);
    }
}

void bytes_put_u8(bytes *b, uint8_t v) {
    bytes_put(b, &v, 1);
}

void bytes_put_u16(bytes *b, uint16_t v) {
    void *to = bytes_extend(b, 2);
    if (to != NULL) {
        store_le16(to, v);
    }
}

void bytes_put_u32(bytes *b, uint32_t v) {
    void *to = bytes_extend(b, 4);
    if (to != NULL) {
        store_le32(to, v);
    }
}

void bytes_put_u64(bytes *b, uint64_t v) {
    void *to = bytes_extend(b, 8);
    if (to != NULL) {
        store_le64(to, v);
    }
}

void bytes_put_string(bytes *b, const char *s) {
    size_t size = strlen(s);
    if (size > UINT16_MAX) {
        b->failed = true;
        return;
    }
    bytes_put_u16(b, (uint16_t)size);
    bytes_put(b, s, size);
}

/* ---- reading ---- */

const void *reader_take(reader *r, size_t size) {
    static const uint8_t nothing[1];
    if (r->failed || size > reader_left(r)) {
        r->failed = true;
        return NULL;
    }
    if (size == 0) {
        return nothing; /* r->data may be NULL, which would look like a failure */
    }
    const uint8_t *at = r->data + r->at;
    r->at += size;
    return at;
}

uint16_t reader_u16(reader *r) {
    const void *p = reader_take(r, 2);
    return p != NULL ? load_le16(p) : 0;
}

uint32_t reader_u32(reader *r) {
    const void *p = reader_take(r, 4);
    return p != NULL ? load_le32(p) : 0;
}

uint64_t reader_u64(reader *r) {
    const void *p = reader_take(r, 8);
    return p != NULL ? load_le64(p) : 0;
}

void reader_string(reader *r, char *out, size_t capacity) {
    if (capacity > 0) {
        out[0] = '\0';
    }
    size_t size = reader_u16(r);
    const char *s = reader_take(r, size);
    if (s == NULL) {
        return;
    }
    if (size >= capacity || !utf8_valid(s, size)) {
        r->failed = true;
        return;
    }
    memcpy(out, s, size);
    out[size] = '\0';
}

/* ---- UTF-8: the well-formed byte sequences of the Unicode Standard, table 3-7 ---- */

/* Returns the length of the character that starts at s; 0 if it is malformed. */
static size_t utf8_character(const uint8_t *s, size_t left) {
    uint8_t lead = s[0], low = 0x80, high = 0xbf;
    size_t length;
    if (lead < 0x80) {
        return lead != 0;
    } else if (lead >= 0xc2 && lead <= 0xdf) {
        length = 2;
    } else if (lead >= 0xe0 && lead <= 0xef) {
        length = 3;
        low = lead == 0xe0 ? 0xa0 : low;   /* overlong forms */
        high = lead == 0xed ? 0x9f : high; /* surrogates */
    } else if (lead >= 0xf0 && lead <= 0xf4) {
        length = 4;
        low = lead == 0xf0 ? 0x90 : low;
        high = lead == 0xf4 ? 0x8f : high; /* beyond U+10FFFF */
    } else {
        return 0;
    }
    if (left < length || s[1] < low || s[1] > high) {
        return 0;
    }
    for (size_t i = 2; i < length; i++) {
        if ((s[i] & 0xc0) != 0x80) {
            return 0;
        }
    }
    return length;
}

bool utf8_valid(const char *s, size_t size) {
    const uint64_t ones = UINT64_C(0x0101010101010101), tops = ones << 7;
    for (size_t at = 0; at < size;) {
        uint64_t eight = size - at >= 8 ? load_le64(s + at) : 0;
        if (eight && !(((eight - ones) | eight) & tops)) { /* eight ASCII characters, none of them NUL */
            at += 8;
            continue;
        }
        size_t length = utf8_character((const uint8_t *)s + at, size - at);
        if (length == 0) {
            return false;
        }
        at += length;
    }
    return true;
}
