/* The fault hook: see file.h. Only tests change it. */
#include "base/file_op.h"

#include <errno.h>

static file_fault_fn fault_hook;
static void *fault_context;

void file_set_fault_hook(file_fault_fn hook, void *context) {
    fault_hook = hook;
    fault_context = context;
}

int file_fault_check(file_op step, const char *path) {
    return fault_hook == NULL ? 0 : fault_hook(fault_context, step, path);
}

int file_op_check(file_op step, const char *path) {
    int fault = file_fault_check(step, path);
    return fault < 0 ? EIO : fault;
}
