/* Shared memory of huge pages: from the system's pool, joined by the kernel, or none at all. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/shared_memory.h"

#define POOL "/proc/sys/vm/nr_hugepages"
#define LOCK \
    "/tmp/ckptdelta-huge-pages.lock" /* tests change the pool one at a time: test_cli_agent.py, too */
#define MORE 6u                      /* pages that a test adds to the pool */

static int lock = -1;
static uint64_t before;

static uint64_t read_number(const char *path, const char *key) {
    char line[256];
    uint64_t number = 0;
    FILE *f = fopen(path, "r");
    while (f && fgets(line, sizeof(line), f)) {
        if (strncmp(line, key, strlen(key)) == 0) {
            number = strtoull(line + strlen(key), NULL, 10);
            break;
        }
    }
    if (f) {
        (void)fclose(f);
    }
    return number;
}

static bool set_pool(uint64_t pages) {
    FILE *f = fopen(POOL, "w");
    bool set = f && fprintf(f, "%llu\n", (unsigned long long)pages) > 0;
    return f && fclose(f) == 0 && set && read_number(POOL, "") == pages;
}

static uint64_t free_pages(void) {
    return read_number("/proc/meminfo", "HugePages_Free:") - read_number("/proc/meminfo", "HugePages_Rsvd:");
}

/* Only root changes the pool, and only a machine with enough memory in one piece has the pages. */
static int set_up(void **state) {
    (void)state;
    lock = open(LOCK, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    before = lock >= 0 && flock(lock, LOCK_EX) == 0 ? read_number(POOL, "") : 0;
    if (!set_pool(before + MORE)) {
        (void)set_pool(before);
    }
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    if (read_number(POOL, "") != before) {
        (void)set_pool(before);
    }
    close(lock);
    return 0;
}

static void need_pool(void) {
    if (free_pages() < MORE) {
        printf("SKIP: huge pages cannot be reserved here (%s)\n", POOL);
        skip();
    }
}

/* Returns a number of KiB that the kernel shows of a mapping of this process. */
static uint64_t shown_of(const void *at, const char *key) {
    char line[256], begin[32];
    bool here = false;
    uint64_t number = UINT64_MAX;
    FILE *f = fopen("/proc/self/smaps", "r");
    int length = snprintf(begin, sizeof(begin), "%llx-", (unsigned long long)(uintptr_t)at);
    assert_non_null(f);
    while (fgets(line, sizeof(line), f) && number == UINT64_MAX) {
        here |= strncmp(line, begin, (size_t)length) == 0;
        number =
            here && strncmp(line, key, strlen(key)) == 0 ? strtoull(line + strlen(key), NULL, 10) : number;
    }
    (void)fclose(f);
    return number;
}

/* One process makes the memory, another one writes to it. */
static void check_shared(const shared_memory *made, uint64_t size, shared_memory *written) {
    ckd_error err;
    assert_int_equal(shared_memory_map(written, dup(made->fd), size, true, &err), CKD_OK);
    assert_int_equal(written->size, made->size);
    for (size_t i = 0; i < made->size; i++) {
        if (made->at[i]) {
            fail_msg("byte %zu is not zero", i);
        }
    }
    memset(written->at, 7, written->size);
    assert_int_equal(made->at[made->size - 1], 7);
    assert_int_not_equal(ftruncate(made->fd, 0), 0);
}

static void test_pages_of_the_pool(void **state) {
    (void)state;
    ckd_error err;
    need_pool();
    uint64_t page = read_number("/proc/meminfo", "Hugepagesize:") << 10, unused = free_pages();
    for (huge_pages huge = HUGE_PAGES_TRY; huge <= HUGE_PAGES_ON; huge++) {
        shared_memory made, written;
        assert_int_equal(shared_memory_make(&made, page + 5, huge, &err), CKD_OK);
        assert_int_equal(made.size, 2 * page);
        assert_int_equal(made.huge_bytes, 2 * page);
        assert_int_equal(shared_memory_bytes(page + 5, huge), 2 * page);
        assert_int_equal(free_pages(), unused - 2); /* reserved, although nobody has touched them */
        check_shared(&made, page + 5, &written);
        assert_int_equal(shown_of(written.at, "KernelPageSize:"), page >> 10);
        shared_memory_release(&written, false);
        shared_memory_release(&made, false);
        assert_int_equal(free_pages(), unused);
    }
}

/* Nothing is left of an attempt that fails, and nobody gets memory that is not there. */
static void test_a_pool_that_is_too_small(void **state) {
    (void)state;
    ckd_error err;
    shared_memory made;
    uint64_t unused = free_pages(), page = read_number("/proc/meminfo", "Hugepagesize:") << 10;
    if (!page || read_number("/proc/sys/vm/nr_overcommit_hugepages", "")) {
        printf("SKIP: this system has no huge pages, or makes more when they are wanted\n");
        skip();
    }
    assert_int_equal(shared_memory_make(&made, unused * page + 1, HUGE_PAGES_ON, &err), CKD_E_NOMEM);
    assert_non_null(strstr(err.message, "vm.nr_hugepages"));
    assert_null(made.at);
    assert_int_equal(made.fd, -1);
    assert_int_equal(free_pages(), unused);
}

/* Asks the kernel itself, so that broken code of ours is no reason to skip. */
static bool kernel_joins(void) {
    const size_t size = 2 << 20;
    int fd = memfd_create("probe", MFD_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, (off_t)(2 * size)), 0);
    uint8_t *at = mmap(NULL, 2 * size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    assert_ptr_not_equal(at, MAP_FAILED);
    uint8_t *aligned =
        at + (size - (uintptr_t)at % size) % size; /* in memory; the file must be aligned alike */
    munmap(at, 2 * size);
    at = mmap(aligned, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED_NOREPLACE, fd, 0);
    assert_ptr_equal(at, aligned);
    memset(at, 1, size);
    bool joins = false;
    for (int tries = 0; tries < 20 && !joins; tries++) {
        joins = madvise(at, size, 25 /* MADV_COLLAPSE */) == 0;
    }
    munmap(at, size);
    close(fd);
    return joins;
}

/* Where the pool has too few, the kernel joins ordinary pages, if it can. The rest is ordinary. */
static void test_ordinary_pages_instead(void **state) {
    (void)state;
    ckd_error err;
    shared_memory made, written;
    uint64_t page = read_number("/proc/meminfo", "Hugepagesize:") << 10;
    uint64_t size = (free_pages() + 4) * (page ? page : 1 << 21) + 4097;
    assert_int_equal(shared_memory_make(&made, size, HUGE_PAGES_TRY, &err), CKD_OK);
    assert_int_equal(made.size % 4096, 0);
    assert_true(made.size >= size && made.size < size + 4096);
    assert_true(made.huge_bytes < made.size);
    check_shared(&made, size, &written);
    assert_int_equal(shown_of(written.at, "KernelPageSize:"), 4);
    uint64_t joined = made.huge_bytes, whole = made.size - made.size % (2 << 20);
    assert_int_equal(shown_of(written.at, "ShmemPmdMapped:"), joined >> 10); /* and mapped as huge ones */
    shared_memory_release(&written, false);
    shared_memory_release(&made, false);
    if (!kernel_joins()) {
        printf("SKIP: this kernel joins no pages of shared memory\n");
        skip();
    }
    assert_int_equal(joined, whole);
}

static void test_off(void **state) {
    (void)state;
    ckd_error err;
    shared_memory made;
    uint64_t unused = free_pages();
    assert_int_equal(shared_memory_make(&made, 5 << 20, HUGE_PAGES_OFF, &err), CKD_OK);
    assert_int_equal(made.huge_bytes, 0);
    assert_int_equal(free_pages(), unused);
    assert_int_equal(shared_memory_bytes((5 << 20) + 1, HUGE_PAGES_OFF), (5 << 20) + 4096);
    shared_memory_release(&made, false);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pages_of_the_pool),
        cmocka_unit_test(test_a_pool_that_is_too_small),
        cmocka_unit_test(test_ordinary_pages_instead),
        cmocka_unit_test(test_off),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
