/*
 * Records what a process changes below a directory: every write, truncation, name and sync, in order. It stands in front of the C
 * library, so that SQLite's calls are seen as well. Only programs
 * that link recorder.o have it.
 */
#ifndef TESTS_SUPPORT_RECORDER_H
#define TESTS_SUPPORT_RECORDER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum op_kind {
    OP_WRITE,    /* `size` bytes at `offset` of `node` */
    OP_TRUNCATE, /* `node` to `offset` bytes */
    OP_SYNC,     /* data and size of `node` */
    OP_NAME,     /* `node` is called `name` in `dir` */
    OP_UNNAME,   /* that name is gone */
    OP_RENAME,   /* from `name` in `dir` to `to_name` in `to_dir`, in one */
    OP_DIR_SYNC, /* the names in `node` */
    OP_EXPECT    /* from here on `expected` holds */
} op_kind;

enum { OP_NAME_MAX = 128, OP_FRAMES = 4 };

typedef struct op {
    op_kind kind;
    unsigned node, dir, to_dir;
    char name[OP_NAME_MAX], to_name[OP_NAME_MAX];
    uint64_t offset;
    size_t size;
    unsigned char *data;
    void *frames[OP_FRAMES]; /* of a sync: where it returns to, and its callers in turn */
    size_t expected;         /* a number of the caller's */
} op;

/* A file or a directory. Names change, nodes do not; number 0 is the directory itself. */
typedef struct op_node {
    uint64_t inode;
    bool is_directory;
    unsigned char *content; /* when recording began */
    size_t size;
    unsigned char *live; /* as it is now */
    size_t live_size;
} op_node;

typedef struct op_record {
    op *ops;
    size_t count, capacity;
    op_node *nodes;
    size_t node_count, node_capacity;
    op *names; /* those that were durable at the beginning, as OP_NAME */
    size_t name_count, name_capacity;
} op_record;

/* All that is below `path` is durable, but for one name that may be lost yet (NULL: none). One recording at a time. */
void recorder_start(op_record *out, const char *path, const char *lost);
void recorder_expect(size_t expected);
/* Fails the test if something has changed without being seen. */
void recorder_stop(void);
/* As it is; after a failure. Nothing where nothing is recorded. */
void recorder_drop(void);
void op_record_free(op_record *r);

#endif
