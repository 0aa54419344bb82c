/* Texts of limited size, JSON strings, decimal numbers, lists of strings. A text that becomes too long is cut off. Nothing here
 * knows about attempts; files are in files.c. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "text.h"

void put(struct text *t, const char *format, ...) {
    va_list args;
    va_start(args, format);
    int n = vsnprintf(t->data + t->used, t->size - t->used, format, args);
    va_end(args);
    if (n > 0)
        t->used = (size_t)n < t->size - t->used ? t->used + (size_t)n : t->size - 1;
}

/* Bytes that are not UTF-8 are written unchanged; readers of the JSON replace them. */
void put_string(struct text *t, const char *value) {
    put(t, "\"");
    for (const unsigned char *c = (const unsigned char *)value; *c; c++)
        if (*c == '"' || *c == '\\')
            put(t, "\\%c", *c);
        else if (*c < 0x20 || *c == 0x7f)
            put(t, "\\u%04x", *c);
        else
            put(t, "%c", *c);
    put(t, "\"");
}

void put_field(struct text *t, const char *key, const char *value) {
    put(t, ",\"%s\":", key);
    put_string(t, value);
}

bool parse_number(const char *text, uint64_t most, uint64_t *value) {
    uint64_t n = 0;
    if (!*text)
        return false;
    for (; *text; text++) {
        if (*text < '0' || *text > '9' || n > (UINT64_MAX - 9) / 10)
            return false;
        n = n * 10 + (uint64_t)(*text - '0');
    }
    *value = n;
    return n <= most;
}

bool push(struct strings *list, char *item) {
    if (list->count + 1 >= list->room) {
        size_t room = list->room ? list->room * 2 : 8;
        char **items = realloc(list->items, room * sizeof *items);
        if (!items)
            return false;
        list->items = items;
        list->room = room;
    }
    list->items[list->count++] = item;
    list->items[list->count] = NULL;
    return true;
}
