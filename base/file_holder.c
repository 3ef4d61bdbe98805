/*
 * Finds lock holders. For open file description locks the kernel does not name a process (F_OFD_GETLK gives -1). But
 * /proc/PID/fdinfo/FD has a line for each lock taken through that descriptor.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "base/file.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PROC_TEXT = 4096, PROC_PATH = 64 };

/* Returns "" if the file cannot be read. */
static void read_text(char out[PROC_TEXT], const char *path) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd >= 0 ? read(fd, out, PROC_TEXT - 1) : 0;
    out[n > 0 ? n : 0] = '\0';
    if (fd >= 0) {
        close(fd);
    }
}

static bool has_lock(long process, const char *descriptor) {
    char path[PROC_PATH], text[PROC_TEXT];
    snprintf(path, sizeof(path), "/proc/%ld/fdinfo/%.20s", process, descriptor);
    read_text(text, path);
    return strstr(text, "OFDLCK") != NULL;
}

static bool holds(long process, const struct stat *file) {
    char path[PROC_PATH];
    snprintf(path, sizeof(path), "/proc/%ld/fd", process);
    DIR *dir = opendir(path);
    bool found = false;
    for (struct dirent *entry = dir ? readdir(dir) : NULL; entry != NULL && !found; entry = readdir(dir)) {
        struct stat st;
        snprintf(path, sizeof(path), "/proc/%ld/fd/%.20s", process, entry->d_name);
        found = entry->d_name[0] != '.' && stat(path, &st) == 0 && st.st_dev == file->st_dev &&
                st.st_ino == file->st_ino && has_lock(process, entry->d_name);
    }
    if (dir != NULL) {
        closedir(dir);
    }
    return found;
}

/* Parses "PID (command) S ...". The command may contain any characters, including parentheses. */
static lock_holder describe(long process) {
    lock_holder out = {.process = process};
    char path[PROC_PATH], text[PROC_TEXT];
    snprintf(path, sizeof(path), "/proc/%ld/stat", process);
    read_text(text, path);
    const char *begin = strchr(text, '('), *end = strrchr(text, ')');
    if (begin == NULL || end == NULL || end < begin) {
        return out;
    }
    size_t length = (size_t)(end - begin) - 1;
    for (size_t i = 0; i < length && i + 1 < sizeof(out.command); i++) {
        char c = begin[1 + i];
        out.command[i] = (char)(c > ' ' && c < 0x7f ? c : '?');
    }
    out.stopped = end[1] == ' ' && (end[2] == 'T' || end[2] == 't');
    return out;
}

bool lock_find_holder(lock_holder *out, const char *path) {
    struct stat file;
    *out = (lock_holder){0};
    DIR *dir = stat(path, &file) == 0 ? opendir("/proc") : NULL;
    uint32_t count = 0;
    for (struct dirent *entry = dir ? readdir(dir) : NULL; entry != NULL; entry = readdir(dir)) {
        char *end;
        long process = strtol(entry->d_name, &end, 10);
        if (process <= 0 || *end != '\0' || !holds(process, &file)) {
            continue;
        }
        count++;
        lock_holder found = describe(process);
        if (out->process == 0 || (found.stopped && !out->stopped)) {
            *out = found;
        }
    }
    if (dir != NULL) {
        closedir(dir);
    }
    out->others = count > 0 ? count - 1 : 0;
    return count > 0;
}
