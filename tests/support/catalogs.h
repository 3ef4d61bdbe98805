/* Checkpoints to fill catalogs with, and other helpers for tests of the catalog. */
#ifndef TESTS_SUPPORT_CATALOGS_H
#define TESTS_SUPPORT_CATALOGS_H

#include "catalog/catalog.h"

/* An id that depends on `seed`, and is never zero. */
ckd_id catalog_sample_id(uint64_t seed);

enum { SAMPLE_FILES = 2 };

enum { CATALOG_PAGE = 1024 }; /* bytes in a page of a new catalog */

/*
 * A checkpoint with two files. Every field is set, each to another value. A test may change the sample, but not move
 * it: `entry` points into it.
 */
typedef struct catalog_sample {
    ckd_checkpoint checkpoint;
    catalog_file files[SAMPLE_FILES];
    catalog_entry entry;
} catalog_sample;

/* Sets generation 0, the id catalog_sample_id(seed), and a delta on catalog_sample_id(seed - 1). */
void catalog_sample_init(catalog_sample *s, const char *run, uint64_t step, uint64_t seed);

/* The id of the store that all these catalogs belong to. */
ckd_id catalog_sample_store(void);
/* Opens dir/catalog.db; fails the test unless it works. */
catalog *catalog_sample_open(const char *dir, catalog_mode mode);
/* Adds a sample in a transaction of its own; fails the test unless it works. */
void catalog_sample_add(catalog *c, const char *run, uint64_t step, uint64_t seed);
/* dir/name. The string is static; the second call from now overwrites it. */
const char *catalog_sample_path(const char *dir, const char *name);

/* Read and write whole files without SQLite. They fail the test on an error. Release the bytes with free. */
unsigned char *catalog_sample_read(const char *path, size_t *size);
void catalog_sample_write(const char *path, const unsigned char *data, size_t size);

/*
 * Makes dir/catalog.db one of version 5, 6 or 7: adds tables of tensors, with rows for each checkpoint, and drops what
 * came later. No handle may be open.
 */
void catalog_sample_age(const char *dir, int version);

#endif
