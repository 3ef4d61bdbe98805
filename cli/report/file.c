/* Files of pages and pictures. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/files/files.h"
#include "cli/report/report.h"

ckd_status report_file_check(const char *path, const char *mark, bool force, ckd_error *err) {
    char start[64] = "";
    size_t length = strlen(mark);
    ckd_status status = cli_output_check(path, true, err);
    if (status != CKD_OK || force || cli_output_is_standard(path)) {
        return status;
    }
    FILE *file = fopen(path, "re");
    if (!file) {
        return errno == ENOENT ? CKD_OK : cli_error_sys(err, errno, path, "cannot look at what is there");
    }
    size_t size = fread(start, 1, length, file);
    fclose(file);
    return size == length && memcmp(start, mark, length) == 0
               ? CKD_OK
               : cli_error_at(
                     err, CKD_E_EXISTS, path, CKD_NO_OFFSET,
                     "the output file exists, and this command did not make it; choose another name, "
                     "or replace it with --force");
}

ckd_status report_file_write(const char *path, char *text, size_t size, bool talks, ckd_error *err) {
    ckd_status status = cli_output_bytes(path, true, text, size, NULL, err);
    free(text);
    if (status == CKD_OK && talks) {
        fputs("wrote ", stdout);
        cli_print_clean(stdout, path);
        fputc('\n', stdout);
    }
    return status;
}
