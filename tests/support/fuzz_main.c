/*
 * Turns a fuzz driver into an ordinary test. It runs the driver on every file in the given folders, on
 * damaged variants of each (cut at many lengths, bytes changed), and on a few inputs without a file. Every
 * run of the same level and seed tries the same inputs. A finding is a crash or a sanitizer report; the file
 * and the variant are printed before each try.
 *
 * Each input is a heap copy of its exact size, so that the address sanitizer notices reads beyond its end.
 */
#include <dirent.h>
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "fuzz.h"
#include "tests/support/level.h"

enum { MAX_BYTES = 1 << 24 };

static void try_input(const uint8_t *data, size_t size) {
    uint8_t *copy = malloc(size ? size : 1);
    if (!copy) {
        fprintf(stderr, "out of memory\n");
        exit(1);
    }
    if (size)
        memcpy(copy, data, size);
    /* The pointer of an empty input must not be read at all. */
    LLVMFuzzerTestOneInput(size ? copy : copy + 1, size);
    free(copy);
}

static uint64_t next_random(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static void try_cuts(const uint8_t *data, size_t size) {
    size_t cuts = test_pick(6, 24, 48);
    for (size_t i = 0; i < cuts && i < size; i++)
        try_input(data, size <= cuts ? i : i * (size / cuts));
    if (size)
        try_input(data, size - 1);
}

/* One to four changes at a time: a flipped bit, an extreme byte, a random byte. */
static void try_changes(uint8_t *data, size_t size) {
    uint64_t random = UINT64_C(0x9e3779b97f4a7c15) ^ size;
    unsigned long changes = test_pick(16, 96, 192);
    random ^= test_first("changes", UINT32_MAX); /* other changes for each seed */
    for (unsigned long i = 0; size && i < changes; i++) {
        size_t at[4];
        uint8_t old[4];
        int count = 1 + (int)(next_random(&random) % 4);
        for (int k = 0; k < count; k++) {
            at[k] = next_random(&random) % size;
            old[k] = data[at[k]];
            switch (next_random(&random) % 4) {
            case 0:
                data[at[k]] = 0xff;
                break;
            case 1:
                data[at[k]] = 0;
                break;
            case 2:
                data[at[k]] = (uint8_t)next_random(&random);
                break;
            default:
                data[at[k]] ^= (uint8_t)(1u << (next_random(&random) % 8));
            }
        }
        try_input(data, size);
        while (count-- > 0)
            data[at[count]] = old[count];
    }
}

static void try_without_files(void) {
    static const uint8_t fill[] = {0x00, 0x01, 0x7f, 0x80, 0xff};
    static const size_t sizes[] = {1, 2, 7, 8, 16, 63, 64, 256, 4096};
    uint8_t bytes[4096];

    try_input(NULL, 0);
    for (size_t f = 0; f < sizeof fill; f++) {
        memset(bytes, fill[f], sizeof bytes);
        for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++)
            try_input(bytes, sizes[s]);
    }
}

static bool try_file(const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file) {
        fprintf(stderr, "%s: %s\n", path, strerror(errno));
        return false;
    }
    uint8_t *data = malloc(MAX_BYTES);
    size_t size = data ? fread(data, 1, MAX_BYTES, file) : 0;
    bool whole = data && !ferror(file) && fgetc(file) == EOF;
    fclose(file);
    if (whole) {
        printf("%s: %zu bytes\n", path, size);
        fflush(stdout);
        try_input(data, size);
        try_cuts(data, size);
        try_changes(data, size);
    } else {
        fprintf(stderr, "%s: cannot be read, or is larger than %d bytes\n", path, MAX_BYTES);
    }
    free(data);
    return whole;
}

static int no_dot_files(const struct dirent *entry) {
    return entry->d_name[0] != '.';
}

/* The files of a folder, in the order of their names. */
static bool try_folder(const char *folder) {
    struct dirent **names = NULL;
    int count = scandir(folder, &names, no_dot_files, alphasort);
    bool good = count > 0;
    if (!good)
        fprintf(stderr, "%s: no files\n", folder);
    for (int i = 0; i < count; i++) {
        char path[4096];
        int length = snprintf(path, sizeof path, "%s/%s", folder, names[i]->d_name);
        good = length > 0 && (size_t)length < sizeof path && try_file(path) && good;
        free(names[i]);
    }
    free(names);
    return good;
}

int main(int argc, char **argv) {
    bool good = true;

    printf("inputs without a file\n");
    fflush(stdout);
    try_without_files();
    for (int i = 1; i < argc; i++) {
        struct stat info;
        bool is_folder = stat(argv[i], &info) == 0 && S_ISDIR(info.st_mode);
        good = (is_folder ? try_folder(argv[i]) : try_file(argv[i])) && good;
    }
    return good ? 0 : 1;
}
