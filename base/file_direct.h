/*
 * Past the page cache: full pieces of a new file, several under way at once. Private to base/file_*.c.
 *
 * One thread at a time fills pieces and puts them; a thread of its own, or the kernel's io_uring, writes them. The first failure is told by the
 * next call, and nothing is written after it.
 */
#ifndef BASE_FILE_DIRECT_H
#define BASE_FILE_DIRECT_H

#include "base/file.h"

typedef struct direct_file direct_file;

/* NULL: not to be had here (the file system, a sandbox, memory): the descriptor is as it was. Pieces are the room's memory. */
direct_file *direct_open(int fd, file_way way, file_room *room);
/* Bytes of a piece: a multiple of what any disk asks for. */
size_t direct_piece_size(const direct_file *d);
/* Memory for the next piece; waits for room. */
uint8_t *direct_room(direct_file *d);
/* Hands over the piece that direct_room gave, which is full, for this offset, a multiple of a piece. 0, or the first failure's errno. */
int direct_put(direct_file *d, uint64_t offset);
/*
 * Waits for what is under way, cuts off what was reserved behind `size` and ends the descriptor's O_DIRECT. 0, or an errno. The memory of the last direct_room stays.
 */
int direct_settle(direct_file *d, uint64_t size);
/* Processor time of the thread that wrote, once it has settled. */
uint64_t direct_helper_ns(const direct_file *d);
/* Waits for what is under way; a forked child only frees. Accepts NULL. */
void direct_free(direct_file *d, bool in_child);

/* ---- file_uring.c: pieces by the kernel ---- */
typedef struct uring uring;
/* For so many at a time; NULL: not to be had. */
uring *uring_open(unsigned depth);
/* Begins to write; `number` tells it from others under way. 0, or an errno. iov must stay until it is told of. */
struct iovec;
int uring_write(uring *u, int fd, const struct iovec *iov, uint64_t offset, unsigned number);
/* Waits for one to end: its number, and in *result bytes written or -errno. */
int uring_wait(uring *u, unsigned *number, int *result);
void uring_close(uring *u); /* none is under way; accepts NULL */

#endif
