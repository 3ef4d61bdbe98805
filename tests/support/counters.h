/* Counters of the kernel for this process, from /proc/self/io (include cmocka.h first). */
#ifndef TESTS_SUPPORT_COUNTERS_H
#define TESTS_SUPPORT_COUNTERS_H

#include <stdint.h>
#include <stdio.h>

static inline uint64_t io_counter(const char *format) {
    unsigned long long count = 0;
    char line[64];
    FILE *f = fopen("/proc/self/io", "r");
    assert_non_null(f);
    while (fgets(line, sizeof(line), f) && sscanf(line, format, &count) != 1) {
    }
    fclose(f);
    return count;
}

/* Bytes that it has given to write() and its kin. */
static inline uint64_t bytes_written(void) {
    return io_counter("wchar: %llu");
}

/* Bytes that it has got from read() and its kin. */
static inline uint64_t bytes_read(void) {
    return io_counter("rchar: %llu");
}

#endif
