//! Numbers and text as the report shows them.

/// Microseconds, to about three digits.
pub fn micros(value: f64) -> String {
    if value < 10.0 {
        format!("{value:.2}")
    } else if value < 200.0 {
        format!("{value:.1}")
    } else {
        format!("{value:.0}")
    }
}

/// Megabytes, to about three digits.
pub fn megabytes(bytes: f64) -> String {
    let mega = bytes / 1e6;
    if mega < 10.0 {
        format!("{mega:.2}")
    } else if mega < 100.0 {
        format!("{mega:.1}")
    } else {
        format!("{mega:.0}")
    }
}

/// A token count, with a space between thousands.
pub fn tokens(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        // Four digits stay together.
        if index > 0 && (digits.len() - index).is_multiple_of(3) && digits.len() > 4 {
            text.push('\u{202f}');
        }
        text.push(digit);
    }
    text
}

/// Text within HTML, also within an attribute.
pub fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            _ => escaped.push(character),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        assert_eq!(micros(1.234), "1.23");
        assert_eq!(micros(127.42), "127.4");
        assert_eq!(micros(530.4), "530");
        assert_eq!(megabytes(65_536.0), "0.07");
        assert_eq!(megabytes(33.6e6), "33.6");
        assert_eq!(tokens(1), "1");
        assert_eq!(tokens(8192), "8192");
        assert_eq!(tokens(32_768), "32\u{202f}768");
        assert_eq!(tokens(1_048_576), "1\u{202f}048\u{202f}576");
    }

    #[test]
    fn text_cannot_become_markup() {
        assert_eq!(
            escape("<b a='\"&\"'>"),
            "&lt;b a=&#39;&quot;&amp;&quot;&#39;&gt;"
        );
    }
}
