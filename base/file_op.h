/* Private to base/file_*.c. */
#ifndef BASE_FILE_OP_H
#define BASE_FILE_OP_H

#include "base/file.h"

#define FILE_IO_MAX \
    ((size_t)1 << 30) /* bytes per system call; Linux stops at 2 GiB - 4 KiB, other systems earlier */

/*
 * Asks the fault hook. Returns 0 or the errno to fail with. Not for FILE_OP_WRITE, where a negative value is no error.
 */
int file_op_check(file_op step, const char *path);

#endif
