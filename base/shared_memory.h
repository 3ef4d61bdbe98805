/*
 * Memory that processes share. It has no name: its descriptor travels over a local socket. Its size is sealed, so no
 * process can take pages away from another one, and its pages are reserved when it is made. So these mappings are safe
 * to read; a mapped file kills the process when it is truncated.
 */
#ifndef BASE_SHARED_MEMORY_H
#define BASE_SHARED_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

typedef struct shared_memory {
    int fd;
    uint8_t *at;       /* NULL: there is none */
    size_t size;       /* whole pages */
    size_t huge_bytes; /* how much of it is huge pages; known to the process that made it */
} shared_memory;

typedef enum huge_pages {
    HUGE_PAGES_OFF,
    HUGE_PAGES_TRY, /* from the system's pool; else the kernel joins ordinary pages as far as it can */
    HUGE_PAGES_ON   /* from the pool only */
} huge_pages;

/* Makes memory of at least `size` bytes, all zero, and maps it for reading. Errors: NOMEM, NOSPACE, IO. */
ckd_status shared_memory_make(shared_memory *out, uint64_t size, huge_pages huge, ckd_error *err);
/* Returns the largest size that memory of at least `size` bytes may get. */
uint64_t shared_memory_bytes(uint64_t size, huge_pages huge);
/*
 * Maps memory that another process made, for reading, or for writing as well. A forked child does not inherit a mapping
 * for writing. Takes ownership of fd, and closes it on failure. Errors: INVALID (its size is not sealed, or it is
 * smaller than `size`), IO, NOMEM.
 */
ckd_status shared_memory_map(shared_memory *out, int fd, uint64_t size, bool write, ckd_error *err);
/* Accepts a zeroed struct. in_child: this is a forked child, which did not inherit the mapping. */
void shared_memory_release(shared_memory *m, bool in_child);

#endif
