/* Private to base/file_*.c. */
#ifndef BASE_FILE_STEP_H
#define BASE_FILE_STEP_H

#include "base/file.h"

#define FILE_IO_MAX \
    ((size_t)1 << 30) /* bytes of one system call: Linux stops at 2 GiB - 4 KiB, others sooner */

/* Asks the fault hook: 0, or the errno to fail with. Not for STEP_WRITE, where a negative answer is no error. */
int step_check(file_step step, const char *path);

#endif
